"""A model of your own in a plain PyTorch loop: packed documents on a ring of ranks, under DDP or FSDP2.

torchrun --nproc-per-node 2 docs/examples/plain_loop.py --wrapper fsdp2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ringflash as rf

VOCAB, DIM, HEADS, SEQLEN = 64, 64, 4, 512


class Model(nn.Module):
    """Returns the loss of each token of this rank's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQLEN, DIM)
        self.qkv, self.mlp, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor, mask, context: rf.ContextParallel) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        x = x + rf.ring_attention(q, k, v, context, mask=mask).flatten(-2)
        logits = self.head(x + torch.relu(self.mlp(x)))
        return cross_entropy(logits.transpose(1, 2), labels, reduction="none") * 1.0


def packed_sequence(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three documents that count upwards from anywhere: tokens and labels (1, SEQLEN), and where documents begin."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, 100, 356, SEQLEN])
    starts = torch.randint(0, VOCAB, (3,), generator=generator)
    tokens = (torch.arange(SEQLEN) + starts.repeat_interleave(cu_seqlens.diff())) % VOCAB
    labels = torch.cat([tokens[1:], tokens[:1]])  # shifted before the sequence is cut
    labels[cu_seqlens[1:] - 1] = -100  # a document does not predict the next one
    return tokens[None], labels[None], cu_seqlens


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--wrapper", choices=["ddp", "fsdp2"], default="fsdp2")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
context = rf.ContextParallel(mesh)
torch.manual_seed(0)  # the same weights on every rank
model: nn.Module = Model().to(device)
if args.wrapper == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(args.steps):
    tokens, labels, cu_seqlens = packed_sequence(step)
    tokens, labels = context.shard(tokens.to(device)), context.shard(labels.to(device))
    positions = context.positions(SEQLEN, device=device)  # in the whole sequence
    mask = rf.Causal() & rf.Documents(cu_seqlens)
    mean = context.token_mean(model(tokens, labels, positions, mask, context), labels)
    mean.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}/{args.steps}  loss {mean.value.item():.4f}", flush=True)
dist.barrier()  # a rank that leaves first would break off a collective of others, such as DDP's last one
dist.destroy_process_group()
