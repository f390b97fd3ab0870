"""Long-context training in plain PyTorch, without Lightning: FSDP2, a ring of ranks and a loop.

torchrun --nproc-per-node 4 docs/examples/torchrun_script.py --context-length 65536
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringflash as rf
from ringflash.train.corpus import CACHE, load_corpus
from ringflash.train.model import Decoder
from ringflash.train.model_config import ModelConfig
from ringflash.train.ring_module import shard_model
from ringflash.train.samples import Line, train_and_held_out
from ringflash.train.strategy import sum_gradients

parser = argparse.ArgumentParser(description=__doc__)
for name, default in {"corpus": "stdlib", "cache_dir": CACHE, "context_length": 4096, "dim": 512, "steps": 100}.items():
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
args = parser.parse_args()
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
corpus = load_corpus(args.corpus, args.cache_dir)
samples, _ = train_and_held_out(Line(corpus), args.context_length, 0, "joined")
with torch.device("meta"):  # no rank ever holds the whole model
    model = Decoder(ModelConfig(corpus.vocab_size, args.dim, 4, args.dim // 64, max(args.dim // 256, 1), 3 * args.dim))
model.keep_activations("block")
shard_model(model, model.layers, mesh, torch.bfloat16 if gpu else torch.float32, head=model.lm_head)
sum_gradients(model)  # each rank's loss is its part of one mean
model.materialise(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Each rank keeps its part of the sequence: tokens, labels that were shifted before the cut, and positions in the whole.
context = rf.ContextParallel(mesh, fixed_lengths=True)
position_ids = context.positions(args.context_length, device=device)
for step in range(args.steps):
    batch = {name: x[None].to(device) for name, x in samples[step % len(samples)].items()}
    input_ids, labels = context.shard(batch["input_ids"]), context.shard(batch["labels"])
    loss = model(input_ids, position_ids, context, labels=labels).total / (batch["labels"] >= 0).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step + 1}/{args.steps}  loss {mean.item():.4f}", flush=True)
dist.barrier()  # who leaves first would break off what others still wait for
dist.destroy_process_group()
