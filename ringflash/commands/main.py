"""The `ringflash` command: training, evaluation, generation, export, plans, benchmarks, checks of the installation."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from ringflash import __version__
from ringflash.errors import ArgumentError, RingflashError

# Each command imports the modules that it needs, because Lightning alone takes seconds to import.

EXIT_FAILURE, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for a usage error, 1 for any other error of the library."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, tuple[Callable[[list[str]], int], str]] = {
        "train": (_train, "train a model: `train fit --config FILE`, or `train auto` for what this machine has"),
        "prepare": (_prepare, "turn text into token files to train on, with any tokenizer"),
        "report": (_report, "draw a run's log, finished or not: a page and a picture in its folder"),
        "evaluate": (_evaluate, "measure a trained model's perplexity by position, alone or over a ring of torchrun's"),
        "generate": (_generate, "continue prompts with a trained model, on one device or over a ring"),
        "retrieval": (_retrieval, "how far back a model finds things: `retrieval fit --config FILE`, then measure it"),
        "checkpoint": (_checkpoint, "compare checkpoints with what was saved: `checkpoint verify FOLDER`"),
        "export": (_export, "write a trained model as a folder that transformers loads"),
        "bench": (_bench, "measure attention on this machine: `bench ring`, `scaling`, `kernels`, ...; `bench --help`"),
        "plan": (_plan, "show what each rank of a ring holds, computes and sends, as tables and a picture"),
        "plan-memory": (_plan_memory, "show what a training run takes of a GPU's memory: `plan-memory --config FILE`"),
        "warmup": (_warmup, "compile a run's kernels ahead of time, on a GPU of the run: `warmup --config FILE`"),
        "doctor": (_doctor, "show what is installed, and test attention on each device"),
    }
    name = args[0] if args else "--help"
    if name in commands:
        _show_messages()
        try:
            return commands[name][0](args[1:])
        except RingflashError as error:
            if "--debug" in args:
                raise
            print(f"ringflash: {error}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ArgumentError) else EXIT_FAILURE
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {command:<12}{text}" for command, (_, text) in commands.items())
        print(f"usage: ringflash COMMAND [ARGUMENTS] [--debug]\n\n{rows}\n\n  --version\n  --debug   show tracebacks")
        return 0 if args else EXIT_USAGE
    if name == "--version":
        print(f"ringflash {__version__}")
        return 0
    near = difflib.get_close_matches(name, commands, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands are {', '.join(commands)}."
    print(f"ringflash: no command {name!r}. {hint}", file=sys.stderr)
    return EXIT_USAGE


def _show_messages() -> None:
    """Shows the library's log on stderr, as the command's own messages: "ringflash: ..."."""
    log = logging.getLogger("ringflash")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ringflash: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _train(args: list[str]) -> int:
    from ringflash.train.commands.train import main as train

    return train(args)


def _prepare(args: list[str]) -> int:
    from ringflash.train.commands.prepare import main as prepare

    return prepare(args)


def _checkpoint(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        row = "  verify    compare checkpoints with what was saved, without opening them"
        print(f"usage: ringflash checkpoint COMMAND [ARGUMENTS]\n\n{row}\n\nIt explains itself with --help.")
        return 0
    from ringflash.train.commands.verify import main as verify

    if args[:1] != ["verify"]:
        got = repr(args[0]) if args else "nothing"
        raise ArgumentError(
            "checkpoint", expected="verify", got=got, remedy="Run `ringflash checkpoint verify FOLDER`."
        )
    return verify(args[1:])


def _plan(args: list[str]) -> int:
    from ringflash.commands.plan import main as plan

    return plan(args)


def _plan_memory(args: list[str]) -> int:
    from ringflash.commands.plan_memory import main as plan_memory

    return plan_memory(args)


def _warmup(args: list[str]) -> int:
    from ringflash.commands.warmup import main as warmup

    return warmup(args)


def _bench(args: list[str]) -> int:
    args = [arg for arg in args if arg != "--debug"]
    benchmarks = {  # name: module, line of the help
        "ring": ("ring.throughput", "ring attention over all ranks, beside its peers; started by torchrun"),
        "scaling": ("ring.scaling", "ring attention by length and by number of ranks; started by torchrun"),
        "training": (
            "training.throughput",
            "training steps on a ring, beside torch's context_parallel; started by torchrun",
        ),
        "model": ("cost_model.command", "what rings should take on any number of GPUs, predicted; runs nothing"),
        "kernels": ("attention.kernels", "attention on one device, beside its peers: speed, memory, errors, HBM bytes"),
        "host": ("attention.host", "what Python and the launches of a warm call take, beside peers"),
        "masks": (
            "attention.masks",
            "attention on one device under masks, beside the time their visible pairs should take",
        ),
        "hops": ("attention.hops", "what a hop of a ring costs by its role, on one device and without a transport"),
        "accuracy": ("ring.errors", "errors of rings against float64 by size and depth, by three ways to merge hops"),
        "decode": ("decode.latency", "decoding with a KV cache, beside its peers"),
    }
    name = args[0] if args else "--help"
    if name in benchmarks:
        if name in ("ring", "scaling", "training"):
            _check_torchrun(name, args[1:])
        return import_module(f"ringflash.bench.{benchmarks[name][0]}").main(args[1:])
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {benchmark:<10}{text}" for benchmark, (_, text) in benchmarks.items())
        print(f"usage: ringflash bench BENCHMARK [ARGUMENTS]\n\n{rows}\n\nEach explains itself with --help.")
        return 0 if args else EXIT_USAGE
    near = difflib.get_close_matches(name, benchmarks, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Put its name first, then its arguments."
    raise ArgumentError("bench", expected=f"one of {', '.join(benchmarks)}", got=repr(name), remedy=remedy)


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


def _generate(args: list[str]) -> int:
    from ringflash.train.commands.generate import main as generate

    return generate(args)


def _retrieval(args: list[str]) -> int:
    from ringflash.train.commands.retrieval import main as retrieval

    return retrieval(args)


def _export(args: list[str]) -> int:
    from ringflash.train.commands.export import main as export

    return export(args)


def _evaluate(args: list[str]) -> int:
    from ringflash.train.commands.evaluate import main as evaluate

    return evaluate(args)


def _report(args: list[str]) -> int:
    from ringflash.train.callbacks.report import main as report

    return report(args)


def _doctor(args: list[str]) -> int:
    text = "Shows what is installed and tests attention; exits with 1 when something is missing or fails."
    parser = argparse.ArgumentParser("ringflash doctor", description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args([arg for arg in args if arg != "--debug"])
    from ringflash.commands.doctor import report

    return 0 if report(as_json=arguments.json) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
