"""`ringflash retrieval`: retrieval accuracy of a trained model by depth and length, as table, JSON and picture.

ringflash retrieval fit --config configs/retrieval-cpu.yaml
ringflash retrieval --checkpoint runs/retrieval-cpu/checkpoints/last --seqlens 512 1024 --png retrieval.png
torchrun --nproc-per-node 4 -m ringflash retrieval --checkpoint ... --seqlens 16384 65536 --depths 10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

import ringflash as rf
from ringflash.commands.options import PRINTED, REQUIRED, add_shared, check_at_least, parser_of
from ringflash.train.callbacks.retrieval_accuracy import (
    Cell,
    RetrievalAccuracy,
    count,
    depth_names,
    draw,
    mean,
    tabulate,
    write,
)
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.commands.launch import inference_dtype, is_first, ranks
from ringflash.train.commands.train import CALLBACKS, RingCLI
from ringflash.train.commands.train import main as train
from ringflash.train.data.retrieval import Grid, RetrievalDataModule, RetrievalTask
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.kv_cache import over_ranks
from ringflash.train.remote import fetched

BATCH_TOKENS = 2**16


class RetrievalCLI(RingCLI):
    """Builds and runs the Trainer on a RetrievalDataModule, and counts right answers."""

    name = "retrieval"
    data = RetrievalDataModule
    run_callbacks = CALLBACKS | {"retrieval": RetrievalAccuracy}
    samples_text = False  # the task has no text


def main(argv: Sequence[str]) -> int:
    """Trains with `fit`, `validate` or `test`, as `ringflash train` does; otherwise measures a checkpoint."""
    if argv and not argv[0].startswith("-"):
        return train(argv, RetrievalCLI)
    options = _parser().parse_args(argv)
    check_at_least(options, ["seqlens", "depths", "samples"])
    grid = Grid(tuple(options.seqlens), options.depths, options.samples, options.seed)
    with ranks(options.device) as (device, context):
        checkpoint = fetched(options.checkpoint, "--checkpoint")
        decoder = load_decoder(checkpoint, dtype=inference_dtype(device)).to(device)
        cells = measure(decoder, grid, context)
        if is_first(context):
            _show(cells, options, context, RetrievalTask(decoder.config.vocab_size))
    return 0


@torch.no_grad()
def measure(decoder: Decoder, grid: Grid, context: rf.ContextParallel | None = None) -> list[Cell]:
    """Returns the accuracies of `decoder` on the sequences of `grid`, over the ring of `context`; a collective."""
    task, device = RetrievalTask(decoder.config.vocab_size), decoder.embed_tokens.weight.device
    right = torch.zeros(len(grid), dtype=torch.int64, device=device)
    for numbers in grid.batches(BATCH_TOKENS):
        batch = {name: x.to(device) for name, x in grid.batch(task, numbers).items()}
        seqlen = batch["input_ids"].shape[1]
        position_ids = torch.arange(seqlen, device=device) if context is None else context.positions(seqlen, device)
        input_ids, labels = (x if context is None else context.shard(x) for x in (batch["input_ids"], batch["labels"]))
        logits = decoder(input_ids, position_ids, context)
        right[batch["row"]] = count(logits, labels, position_ids, seqlen - 1)
    return tabulate(right if context is None else over_ranks(right[None], context)[0], grid)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "retrieval", "Measures how far back a trained model finds things; `retrieval fit --config FILE` trains one."
    )
    add_shared(parser, checkpoint=REQUIRED, seqlens=[1024])
    parser.add_argument("--depths", type=int, default=10, help="parts of the context (default: %(default)s)")
    add_shared(parser, "json", "png", "debug", samples=10, seed=1, device="auto")
    return parser


def _show(
    cells: Sequence[Cell], options: argparse.Namespace, context: rf.ContextParallel | None, task: RetrievalTask
) -> None:
    ring = 1 if context is None else context.world_size
    table = Table(title=f"right answers by depth, {options.samples} sequences each; {1 / task.num_keys:.0%} by chance")
    table.add_column("tokens", justify="right")
    for name in depth_names(options.depths):
        table.add_column(name, justify="right")
    for i in range(0, len(cells), options.depths):
        row = cells[i : i + options.depths]
        table.add_row(f"{row[0].length:,}", *(f"{cell.accuracy:.0%}" for cell in row))
    if options.json != PRINTED:
        Console().print(table, f"mean {mean(cells):.1%}, a ring of {ring}", sep="\n")
    if options.json is not None:
        write(options.json, cells, checkpoint=str(options.checkpoint), ranks=ring, chance=1 / task.num_keys)
    if options.png is not None:
        draw(options.png, cells)
