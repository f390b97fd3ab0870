"""Long-context training in plain PyTorch: FSDP2, a ring of ranks, and a loop.

    torchrun --nproc-per-node 4 -m ringflash.train.plain --context-length 65536
    torchrun --nproc-per-node 2 -m ringflash.train.plain --dim 128 --layers 2 --heads 2      (on a CPU)

What `ringflash train` does with Lightning, without checkpoints, logs and resume, to read or to start from.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ringflash as rf
from ringflash.train.corpus import CACHE, load_corpus
from ringflash.train.loss import count_valid
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig
from ringflash.train.samples import Line, train_and_held_out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", default=["stdlib"], help="a prepared folder, text files, or stdlib")
    parser.add_argument("--cache-dir", default=CACHE)
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    return parser.parse_args()


def join_ranks() -> tuple[torch.device, DeviceMesh]:
    """Meets the other ranks that torchrun has started: NCCL with GPUs, gloo without."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device, init_device_mesh(device.type, (dist.get_world_size(),))


def build_model(config: ModelConfig, device: torch.device, mesh: DeviceMesh) -> Decoder:
    """A decoder whose weights are sharded over all ranks, block by block, before they have storage."""
    with torch.device("meta"):
        model = Decoder(config)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if device.type == "cuda":  # compute in bfloat16, keep weights and add gradients in float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is its own part of one mean, so gradients add up. FSDP would average them, and the
            # ring would train at 1 / world_size of the gradient. The second line asks gloo for what it can do.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return model


def main() -> None:
    args = parse_arguments()
    device, mesh = join_ranks()
    ffn_dim = 64 * round(args.dim * 8 / 3 / 64)
    corpus = load_corpus(args.corpus, args.cache_dir)
    samples, _ = train_and_held_out(Line(corpus), args.context_length, 0, "joined")
    config = ModelConfig(corpus.vocab_size, args.dim, args.layers, args.heads, min(args.kv_heads, args.heads), ffn_dim)
    model = build_model(config, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))  # the same on every rank

    # Every rank reads the same sequence and keeps its part of it: tokens, labels that were shifted before the cut,
    # and the positions that its tokens have in the whole. Nothing else in the model knows that there is a ring.
    context = rf.ContextParallel(mesh)
    position_ids = context.positions(args.context_length, device=device)
    for step in range(args.steps):
        start = time.perf_counter()
        batch = {name: x[None].to(device) for name, x in samples[int(order[step % len(order)])].items()}
        num_valid_tokens = count_valid(batch["labels"])  # of the whole sequence, not of this rank's part
        input_ids, labels = context.shard(batch["input_ids"]), context.shard(batch["labels"])

        loss = model(input_ids, position_ids, context, labels=labels).total / num_valid_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()

        loss = loss.detach()
        dist.all_reduce(loss)  # the parts of the mean
        mean = loss.item()  # waits for the device: the step has ended when the clock is read
        if dist.get_rank() == 0:
            rate = args.context_length / (time.perf_counter() - start)
            print(f"step {step + 1}/{args.steps}  loss {mean:.4f}  tokens/s {rate:,.0f}", flush=True)
    dist.barrier()  # a rank that leaves first would break off what its peers still wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
