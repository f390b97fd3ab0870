"""`ringflash ruler`: RULER's synthetic tasks over lengths, on one device or, under torchrun, over a ring.

ringflash ruler --checkpoint runs/h200-4/checkpoints/last --seqlens 8192 16384
torchrun --nproc-per-node 4 -m ringflash ruler --checkpoint FOLDER --seqlens 131072 --chat-template
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import ringflash as rf
from ringflash.commands.options import PRINTED, REQUIRED, Described, add_shared, parser_of, put_json
from ringflash.errors import ArgumentError, CheckpointError
from ringflash.train.checkpoint.load import load_decoder
from ringflash.train.checkpoint.manifest import locate
from ringflash.train.commands.launch import inference_dtype, is_first, ranks
from ringflash.train.data.chat import Chat
from ringflash.train.data.ruler import TASKS, check_names, make_sample, score
from ringflash.train.data.tokenizer import Tokenizer
from ringflash.train.models.config import ModelConfig
from ringflash.train.models.decoder import Decoder
from ringflash.train.models.generate import Sampling, continue_prompts
from ringflash.train.models.huggingface import CONFIG, read_config
from ringflash.train.models.weights import Weights
from ringflash.train.remote import fetched

BATCH_TOKENS = 2**16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Rules for turning questions into token ids, and answers into text.

    Args:
        tokenizer: tokenizer of the model.
        prefix: ids before every prompt.
        chat: chat template in which a question is a user's message; None for plain text.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...] = ()
    chat: Chat | None = None

    def encode(self, question: str, beginning: str) -> list[int]:
        """Returns the ids of a question and the beginning of its answer."""
        asked = question if self.chat is None else self.chat.prompt(question)
        return [*self.prefix, *self.tokenizer.encode(asked + beginning)]

    @property
    def sampling(self) -> Sampling:
        """Rule that takes the likeliest tokens, up to the end of the document or of the assistant's turn."""
        turn = None if self.chat is None else self.chat.turn_end(self.tokenizer)
        end = self.tokenizer.end_of_document if turn is None else turn
        return Sampling(0.0, stop_token=end, vocab_size=self.tokenizer.vocab_size)


@dataclass(frozen=True)
class Result:
    """Percentage of the right answers that a model gave in a task's samples of one length, and the texts it gave."""

    task: str
    length: int
    score: float
    texts: list[str]
    answers: list[tuple[str, ...]]


def main(argv: Sequence[str]) -> int:
    """Prints the table, and writes the requested file; every rank of torchrun calls it."""
    options = _parser().parse_args(argv)
    if options.samples < 1:
        remedy = "RULER takes 500; 20 show large differences."
        raise ArgumentError("--samples", expected="at least 1", got=options.samples, remedy=remedy)
    with ranks(options.device) as (device, context):
        folder = fetched(options.checkpoint, "--checkpoint").expanduser()
        of_transformers = (folder / CONFIG).is_file()
        if not locate(folder).is_dir():
            remedy = "Name one, as in runs/h200-4/checkpoints/last."
            expected = "a folder of a checkpoint or of a model of transformers"
            raise CheckpointError("--checkpoint", expected=expected, got=f"{folder}, no folder", remedy=remedy)
        prompts = _prompts(options, folder, of_transformers)
        check_names(options.tasks)
        for name in options.tasks:
            make_sample(name, min(options.seqlens), prompts.encode)  # raises before the model is loaded
        decoder = _load(folder, of_transformers, device)
        check_positions(decoder.config, max(options.seqlens))
        results = []
        for length in options.seqlens:
            for name in options.tasks:
                results.append(measure(decoder, prompts, name, length, options.samples, options.seed, context))
                if is_first(context):
                    log.info("%s, %s tokens: %.1f", name, f"{length:,}", results[-1].score)
        if is_first(context):
            _show(results, options, 1 if context is None else context.world_size)
    return 0


def measure(
    decoder: Decoder,
    prompts: Prompts,
    name: str,
    length: int,
    samples: int,
    seed: int,
    context: rf.ContextParallel | None = None,
) -> Result:
    """Returns the score of `decoder` in `samples` texts of a task, over the ring of `context`; a collective."""
    batch, texts, answers = max(1, BATCH_TOKENS // length), [], []
    for begin in range(0, samples, batch):
        numbers = range(begin, min(begin + batch, samples))
        made = [make_sample(name, length, prompts.encode, seed, number) for number in numbers]
        tokens = [torch.tensor(sample.prompt) for sample in made]
        new = continue_prompts(decoder, tokens, made[0].new_tokens, prompts.sampling, context=context)
        texts += [prompts.tokenizer.decode(x) for x in new]
        answers += [sample.answers for sample in made]
    shares = [score(text, answer) for text, answer in zip(texts, answers, strict=True)]
    return Result(name, length, 100 * sum(shares) / samples, texts, answers)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "ruler",
        "Scores of RULER's synthetic tasks by length, of a checkpoint or of a folder of transformers; "
        "under torchrun, over a ring of all ranks. The length is that of prompt and answer.",
    )
    add_shared(parser, checkpoint=REQUIRED, seqlens=[4096], samples=20, seed=0)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], help=f"default: {' '.join(TASKS)}")
    text = "ask in the chat template of the tokenizer's folder"
    parser.add_argument("--chat-template", action="store_true", help=text)
    add_shared(parser, "json", "debug", tokenizer=Described("the model's own"), device="auto")
    return parser


def _prompts(options: argparse.Namespace, folder: Path, of_transformers: bool) -> Prompts:
    source = options.tokenizer or (folder if of_transformers else Tokenizer.folder_of_run(folder))
    tokenizer = Tokenizer.load(source)
    if options.chat_template:  # the template writes the special tokens itself
        return Prompts(tokenizer, chat=Chat.load(source))
    return Prompts(tokenizer, tuple(tokenizer.prefix) if of_transformers else ())


def _load(folder: Path, of_transformers: bool, device: torch.device) -> Decoder:
    """Loads the decoder of a checkpoint, or of a folder of transformers."""
    dtype = inference_dtype(device)
    if not of_transformers:
        return load_decoder(folder, dtype=dtype).to(device)
    with torch.device("meta"):
        decoder = Decoder(read_config(folder), weights=Weights(folder))
    decoder.to(dtype).materialise(device)
    return decoder


def check_positions(config: ModelConfig, length: int) -> None:
    """Raises ArgumentError if the model has fewer than `length` positions."""
    most, scaling = config.max_position_embeddings, config.rope_scaling
    if most is not None and scaling is not None and scaling.rope_type == "dynamic":
        most = int(most * scaling.factor)  # of this type alone, config.json has the length before scaling
    if most is not None and length > most:
        remedy = "Leave the length out, or raise max_position_embeddings if the model is meant for more."
        expected = f"at most {most}, the model's positions"
        raise ArgumentError("--seqlens", expected=expected, got=length, remedy=remedy)


def _show(results: Sequence[Result], options: argparse.Namespace, world_size: int) -> None:
    scores = {(each.task, each.length): each.score for each in results}
    table = Table("task", title=f"RULER on the noise haystack: percent right, {options.samples} texts each")
    for length in options.seqlens:
        table.add_column(f"{length:,}", justify="right")
    for task in options.tasks:
        table.add_row(task, *(f"{scores[task, length]:.1f}" for length in options.seqlens))
    table.add_section()
    means = [sum(scores[task, length] for task in options.tasks) / len(options.tasks) for length in options.seqlens]
    table.add_row("mean", *(f"{mean:.1f}" for mean in means))
    if options.json != PRINTED:
        Console().print(table)
    if options.json is not None:
        facts = {name: getattr(options, name) for name in ("checkpoint", "samples", "seed", "chat_template")}
        content = {**facts, "ranks": world_size, "results": [asdict(each) for each in results]}
        put_json(options.json, content)
