"""`ringflash evaluate`: perplexity by position on the held-out end of a corpus, on one device or over a ring.

torchrun --nproc-per-node 4 -m ringflash evaluate --checkpoint runs/h200-4/checkpoints/last --context-length 65536
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ringflash as rf
from ringflash.commands.options import PRINTED, REQUIRED, Described, add_shared, check_at_least, parser_of, put_json
from ringflash.errors import ArgumentError, DataError
from ringflash.train.callbacks.loss_by_position import NUM_BUCKETS, Bucket, buckets, table_by_position
from ringflash.train.callbacks.report_picture import draw_by_position
from ringflash.train.checkpoint.load import load_decoder_and_rest
from ringflash.train.commands.launch import inference_dtype, ranks
from ringflash.train.data.corpus import CACHE
from ringflash.train.data.module import TextDataModule
from ringflash.train.data.samples import Packing, train_and_held_out
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.exchange import all_ranks
from ringflash.train.lightning.batch import document_positions, documents_of
from ringflash.train.models.decoder import Decoder
from ringflash.train.remote import fetched


@torch.no_grad()
def losses_by_position(
    decoder: Decoder, batches: Iterable[Mapping[str, Tensor]], context: rf.ContextParallel | None = None
) -> Tensor:
    """Returns (2, NUM_BUCKETS) float64: sums of token losses and numbers of tokens by position, of this rank's shards.

    With a context every rank has the whole decoder and passes the same whole sequences; their tables must be added.

    Args:
        decoder: decoder on the device to compute on.
        batches: {"input_ids", "labels": (batch, seqlen) int64}. With "cu_seqlens", (batch, ndocuments + 1) int64, no
            token sees another document, and positions restart at each.
        context: ranks that share each sequence; None when this rank has all of it.

    Raises:
        DataError: a token id that the decoder lacks.
    """
    device = decoder.embed_tokens.weight.device
    table = torch.zeros(2, NUM_BUCKETS, dtype=torch.float64, device=device)
    for batch in batches:
        highest, known = int(batch["input_ids"].max()), decoder.config.vocab_size
        if highest >= known:
            remedy = "Evaluate on text that was tokenized as the training text was."
            raise DataError("corpus", expected=f"token ids below {known}", got=highest, remedy=remedy)
        seqlen, cu_seqlens = batch["input_ids"].shape[1], batch.get("cu_seqlens")
        position_ids = torch.arange(seqlen) if context is None else context.positions(seqlen, device="cpu")
        if cu_seqlens is not None:
            position_ids = document_positions(cu_seqlens, position_ids)
        input_ids, labels = (batch[name].to(device) for name in ("input_ids", "labels"))
        if context is not None:
            input_ids, labels = context.shard(input_ids), context.shard(labels)
        position_ids = position_ids.to(device)
        losses = decoder(input_ids, position_ids, context, documents=documents_of(batch), labels=labels)
        table += table_by_position(losses.tokens, labels, position_ids)
    return table


def record(found: Sequence[Bucket], **facts: Any) -> dict[str, Any]:
    """Returns the content of `--json`: `facts`, the values over all tokens, and those of each bucket."""
    tokens, loss_sum = sum(b.tokens for b in found), sum(b.loss_sum for b in found)
    whole = Bucket(0, found[-1].last, tokens, loss_sum)
    rows = [asdict(b) | {"loss": b.loss, "perplexity": b.perplexity} for b in found]
    return {**facts, "tokens": tokens, "loss": whole.loss, "perplexity": whole.perplexity, "by_position": rows}


def main(argv: Sequence[str]) -> int:
    """Prints the table, and writes the requested files; every rank of torchrun calls it."""
    options = _parser().parse_args(argv)
    check_at_least(options, ["max_samples"], remedy="Leave it out for all.")
    with ranks(options.device) as (device, context):
        named, options.checkpoint = options.checkpoint, fetched(options.checkpoint, "--checkpoint")
        decoder, rest = load_decoder_and_rest(options.checkpoint, dtype=inference_dtype(device))
        data, decoder = _data(options, rest.get(TextDataModule.__qualname__, {})), decoder.to(device)
        batches = itertools.islice(data.val_dataloader(), options.max_samples)
        table = losses_by_position(decoder, batches, context)
        if context is not None:
            table = all_ranks(table.flatten(), dist.group.WORLD).sum(0).view_as(table)  # pyright: ignore[reportArgumentType]
            if context.rank:
                return 0
    found = buckets(table)
    if not found:
        remedy = "Raise --val-fraction."
        raise DataError("corpus", expected="held-out tokens with a label", got="none", remedy=remedy)
    facts = {"checkpoint": str(named), "corpus": options.corpus, "context_length": options.context_length}
    result = record(found, **facts)
    if options.json != PRINTED:
        Console().print(_table(found, result))
    if options.json is not None:
        put_json(options.json, result)
    if options.png is not None:
        draw_by_position([("held out", [(b.first, b.last, b.loss) for b in found])], options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "evaluate", "Perplexity by position on a corpus' held-out end; under torchrun, over a ring of all ranks."
    )
    add_shared(parser, checkpoint=REQUIRED)
    parser.add_argument("--corpus", nargs="+", help="files, folders or token files (default: the corpus of training)")
    parser.add_argument("--context-length", type=int, required=True, metavar="N", help="tokens a sample")
    text = "samples to measure, at most (default: all that are held out)"
    parser.add_argument("--max-samples", type=int, metavar="N", help=text)
    parser.add_argument("--documents", choices=get_args(Packing), help="how they are packed (default: as in training)")
    parser.add_argument("--cache-dir", default=CACHE, help="of token files (default: %(default)s)")
    add_shared(parser, "json", "png", "debug", val_fraction=Described("as in training"), device="auto")
    return parser


def _data(options: argparse.Namespace, trained: Mapping[str, Any]) -> TextDataModule:
    """Returns the held-out data of `options.corpus`, which becomes the corpus of training if there is none.

    `trained` is the state of the data module of the model's training.
    """
    options.corpus = options.corpus or trained.get("sources")
    if options.corpus is None:
        remedy = "Name the files or the folder of token files."
        got = "none, and the checkpoint does not name that of its training"
        raise ArgumentError("--corpus", expected="the text to evaluate on", got=got, remedy=remedy)
    sources = options.corpus[0] if len(options.corpus) == 1 else options.corpus
    held_out = options.val_fraction
    data = TextDataModule(
        sources,
        context_length=options.context_length,
        documents=options.documents or trained.get("documents", "packed"),
        val_fraction=trained.get("val_fraction") if held_out is None else held_out,
        cache_dir=options.cache_dir,
    )
    data.prepare_data()
    data.setup("validate")
    if trained.get("corpus") == data.state_dict()["corpus"]:
        _check_held_out(data, trained)
    with suppress(DataError):  # a checkpoint outside its run's folder has no tokenizer
        of_run = Tokenizer.of_run(options.checkpoint)
        if of_run != data.tokenizer:
            remedy = "Prepare the corpus with the tokenizer in the run's folder."
            raise ArgumentError("--corpus", expected=of_run.name, got=data.tokenizer.name, remedy=remedy)
    return data


def _check_held_out(data: TextDataModule, trained: Mapping[str, Any]) -> None:
    """Raises ArgumentError if the samples begin before the tokens that training held out.

    A part of at least one sample is held out. It begins earlier if samples are longer than in training.
    """
    fraction, samples = data.state_dict()["val_fraction"], data.val_samples()
    if trained["val_fraction"] < fraction:
        raise ArgumentError(
            "--val-fraction",
            expected=f"at most {trained['val_fraction']:g}: the model was trained on the rest of this corpus",
            got=fraction,
            remedy="Leave it out.",
        )
    settings = trained["context_length"], trained["val_fraction"], trained["documents"]
    first = train_and_held_out(samples.line, *settings)[1].first
    if samples.first < first:
        raise ArgumentError(
            "--context-length",
            expected=f"samples within the {len(samples.line) - first:,} tokens that training held out",
            got=f"{data.context_length}, whose samples begin among tokens that the model was trained on",
            remedy="Lower it, pass another --corpus, or train with a larger val_fraction.",
        )


def _table(found: Sequence[Bucket], result: Mapping[str, Any]) -> Table:
    table = Table("position", "tokens", "loss", "perplexity", title=f"Held-out end of {', '.join(result['corpus'])}")
    for column in table.columns:
        column.justify = "right"
    for b in found:
        table.add_row(b.name, f"{b.tokens:,}", f"{b.loss:.4f}", f"{b.perplexity:.4g}")
    table.add_section()
    table.add_row("all", f"{result['tokens']:,}", f"{result['loss']:.4f}", f"{result['perplexity']:.4g}")
    return table
