"""The `ringflash` command: training, evaluation, generation, export, plans, benchmarks, checks of the installation."""

from __future__ import annotations

import difflib
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from ringflash import __version__, extras
from ringflash.errors import ArgumentError, RingflashError

# Each command imports the modules that it needs, because Lightning alone takes seconds to import.

EXIT_FAILURE, EXIT_USAGE = 1, 2

# Name: module below ringflash with a function `main`, or "module:function"; line of the help.
Commands = Mapping[str, tuple[str, str]]

COMMANDS: Commands = {
    "train": (
        "train.commands.train",
        "train a model: `train fit --config FILE`, or `train auto` for what this machine has",
    ),
    "finetune": (
        "train.commands.finetune",
        "train a model of transformers, whole or by LoRA: `finetune fit --config FILE`",
    ),
    "dpo": (
        "train.commands.finetune:dpo",
        "train a model of transformers on preferences between two answers: `dpo fit --config FILE`",
    ),
    "prepare": ("train.commands.prepare", "turn text into token files to train on, with any tokenizer"),
    "report": ("train.callbacks.report", "draw a run's log, finished or not: a page and a picture in its folder"),
    "evaluate": (
        "train.commands.evaluate",
        "measure a trained model's perplexity by position, alone or over a ring of torchrun's",
    ),
    "generate": ("train.commands.generate", "continue prompts with a trained model, on one device or over a ring"),
    "retrieval": (
        "train.commands.retrieval",
        "how far back a model finds things: `retrieval fit --config FILE`, then measure it",
    ),
    "ruler": ("train.commands.ruler", "score RULER's tasks by length, alone or over a ring of torchrun's"),
    "checkpoint": ("train.commands.verify", "compare checkpoints with what was saved: `checkpoint verify FOLDER`"),
    "export": ("train.commands.export", "write a trained model as a folder that transformers loads"),
    "bench": ("", "measure attention on this machine: `bench ring`, `scaling`, `kernels`, ...; `bench --help`"),
    "plan": ("commands.plan", "show what each rank of a ring holds, computes and sends, as tables and a picture"),
    "plan-memory": (
        "commands.plan_memory",
        "show what a training run takes of a GPU's memory: `plan-memory --config FILE`",
    ),
    "warmup": ("commands.warmup", "compile a run's kernels ahead of time, on a GPU of the run: `warmup --config FILE`"),
    "doctor": ("commands.doctor", "show what is installed, and test attention on each device"),
}

BENCHMARKS: Commands = {
    "ring": ("bench.ring.throughput", "ring attention over all ranks, beside its peers; started by torchrun"),
    "scaling": ("bench.ring.scaling", "ring attention by length and by number of ranks; started by torchrun"),
    "training": (
        "bench.training.throughput",
        "training steps on a ring, beside torch's context_parallel; started by torchrun",
    ),
    "model": ("bench.cost_model.command", "what rings should take on any number of GPUs, predicted; runs nothing"),
    "kernels": (
        "bench.attention.kernels",
        "attention on one device, beside its peers: speed, memory, errors, HBM bytes",
    ),
    "host": ("bench.attention.host", "what Python and the launches of a warm call take, beside peers"),
    "masks": (
        "bench.attention.masks",
        "attention on one device under masks, beside the time their visible pairs should take",
    ),
    "hops": ("bench.attention.hops", "what a hop of a ring costs by its role, on one device and without a transport"),
    "accuracy": ("bench.ring.errors", "errors of rings against float64 by size and depth, by three ways to merge hops"),
    "decode": ("bench.decode.latency", "decoding with a KV cache, beside its peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for a usage error, 1 for any other error of the library."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else "--help"
    if name in COMMANDS:
        _show_messages()
        try:
            return _bench(args[1:]) if name == "bench" else _run(COMMANDS, args)
        except RingflashError as error:
            if "--debug" in args:
                raise
            print(f"ringflash: {error}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ArgumentError) else EXIT_FAILURE
    if name in ("-h", "--help"):
        print(f"usage: ringflash COMMAND [ARGUMENTS] [--debug]\n\n{_rows(COMMANDS, 12)}\n")
        print("  --version\n  --debug   show tracebacks")
        return 0 if args else EXIT_USAGE
    if name == "--version":
        print(f"ringflash {__version__}")
        return 0
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands are {', '.join(COMMANDS)}."
    print(f"ringflash: no command {name!r}. {hint}", file=sys.stderr)
    return EXIT_USAGE


def _run(commands: Commands, args: list[str]) -> int:
    module, _, function = commands[args[0]][0].partition(":")
    needs = f"`ringflash {args[0]}`"
    if module.startswith("train."):
        extras.require("train", needs)
    try:
        return getattr(import_module(f"ringflash.{module}"), function or "main")(args[1:])
    except ModuleNotFoundError as error:
        if (missing := extras.missing(error, needs)) is None:
            raise
        raise missing from error


def _rows(commands: Commands, width: int) -> str:
    return "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in commands.items())


def _show_messages() -> None:
    """Shows the library's log on stderr, as the command's own messages: "ringflash: ..."."""
    log = logging.getLogger("ringflash")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ringflash: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _bench(args: list[str]) -> int:
    args = [arg for arg in args if arg != "--debug"]
    name = args[0] if args else "--help"
    if name in BENCHMARKS:
        _check_json_file(name, args[1:])
        if name in ("ring", "scaling", "training"):
            _check_torchrun(name, args[1:])
        return _run(BENCHMARKS, args)
    if name in ("-h", "--help"):
        print(f"usage: ringflash bench BENCHMARK [ARGUMENTS]\n\n{_rows(BENCHMARKS, 10)}\n")
        print("Each explains itself with --help.")
        return 0 if args else EXIT_USAGE
    near = difflib.get_close_matches(name, BENCHMARKS, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Put its name first, then its arguments."
    raise ArgumentError("bench", expected=f"one of {', '.join(BENCHMARKS)}", got=repr(name), remedy=remedy)


def _check_json_file(benchmark: str, args: list[str]) -> None:
    """Raises ArgumentError for `--json` without a file, since benchmarks write their figures again after each cell."""
    following = args[args.index("--json") + 1 :] if "--json" in args else ["FILE"]
    if not following or following[0].startswith("-") or "--json=-" in args:
        raise ArgumentError("--json", expected="a FILE", got="none", remedy=f"Name one: --json {benchmark}.json.")


def _check_torchrun(benchmark: str, args: list[str]) -> None:
    if "RANK" in os.environ or {"-h", "--help"} & {*args}:
        return
    import torch

    processes = torch.cuda.device_count() or 2
    command = ["torchrun", "--nproc-per-node", str(processes), "-m", "ringflash.bench", benchmark, *args]
    raise ArgumentError(
        f"bench {benchmark}",
        expected="a process a GPU, started by torchrun",
        got="one without torchrun",
        remedy=f"Run it as\n\n    {shlex.join(command)}\n",
    )


if __name__ == "__main__":
    sys.exit(main())
