"""The `ringflash` command: trains, generates, evaluates, plans, measures, and looks at the installation."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from ringflash import __version__
from ringflash.errors import ArgumentError, RingflashError

# Everything else is imported by the command that needs it: Lightning alone takes seconds.

EXIT_FAILURE, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for an error of usage, 1 for any other of the library's errors."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, tuple[Callable[[list[str]], int], str]] = {
        "train": (_train, "train a model: `train fit --config FILE`, or `train auto` for what this machine has"),
        "generate": (_generate, "continue a prompt with a trained model"),
        "evaluate": (_evaluate, "measure a trained model's perplexity by position, alone or over a ring of torchrun's"),
        "report": (_report, "draw a run's log, finished or not: a page and a picture in its folder"),
        "bench": (_bench, "measure attention on this machine: `bench ring`, `scaling`, `kernels`, ...; `bench --help`"),
        "plan": (_plan, "show what each rank of a ring holds, computes and sends, as tables and a picture"),
        "doctor": (_doctor, "show what is installed and what attention would run on"),
    }
    name = args[0] if args else "--help"
    if name in commands:
        try:
            return commands[name][0](args[1:])
        except RingflashError as error:
            if "--debug" in args:
                raise
            print(f"ringflash: {error}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ArgumentError) else EXIT_FAILURE
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {command:<10}{text}" for command, (_, text) in commands.items())
        print(f"usage: ringflash COMMAND [ARGUMENTS] [--debug]\n\n{rows}\n\n  --version\n  --debug   show tracebacks")
        return 0 if args else EXIT_USAGE
    if name == "--version":
        print(f"ringflash {__version__}")
        return 0
    near = difflib.get_close_matches(name, commands, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands are {', '.join(commands)}."
    print(f"ringflash: no command {name!r}. {hint}", file=sys.stderr)
    return EXIT_USAGE


def _train(args: list[str]) -> int:
    from ringflash.train.cli import main as train

    return train(args)


def _plan(args: list[str]) -> int:
    from ringflash.plan_command import main as plan

    return plan(args)


def _bench(args: list[str]) -> int:
    args = [arg for arg in args if arg != "--debug"]
    benchmarks: dict[str, tuple[Callable[[list[str]], int], str]] = {
        "ring": (_bench_ring, "ring attention over all ranks, beside its peers; started by torchrun"),
        "scaling": (_bench_scaling, "ring attention by length and by number of ranks; started by torchrun"),
        "model": (_bench_model, "what rings should take on any number of GPUs, predicted; runs nothing"),
        "kernels": (_bench_kernels, "attention on one device, beside its peers: speed, memory, errors, HBM bytes"),
        "masks": (_bench_masks, "attention on one device under masks, beside the time their visible pairs should take"),
        "hops": (_bench_hops, "what a hop of a ring costs by its role, on one device and without a transport"),
        "decode": (_bench_decode, "decoding with a KV cache, beside its peers"),
    }
    name = args[0] if args else "--help"
    if name in benchmarks:
        return benchmarks[name][0](args[1:])
    if name in ("-h", "--help"):
        rows = "\n".join(f"  {benchmark:<10}{text}" for benchmark, (_, text) in benchmarks.items())
        print(f"usage: ringflash bench BENCHMARK [ARGUMENTS]\n\n{rows}\n\nEach explains itself with --help.")
        return 0 if args else EXIT_USAGE
    near = difflib.get_close_matches(name, benchmarks, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Put its name first, then its arguments."
    raise ArgumentError("bench", expected=f"one of {', '.join(benchmarks)}", got=repr(name), remedy=remedy)


def _bench_ring(args: list[str]) -> int:
    _check_torchrun("ring", args)
    from ringflash.bench.ring import main as bench

    return bench(args)


def _bench_scaling(args: list[str]) -> int:
    _check_torchrun("scaling", args)
    from ringflash.bench.scaling import main as bench

    return bench(args)


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


def _bench_model(args: list[str]) -> int:
    from ringflash.bench.model_command import main as bench

    return bench(args)


def _bench_kernels(args: list[str]) -> int:
    from ringflash.bench.kernels import main as bench

    return bench(args)


def _bench_masks(args: list[str]) -> int:
    from ringflash.bench.masks import main as bench

    return bench(args)


def _bench_hops(args: list[str]) -> int:
    from ringflash.bench.hops import main as bench

    return bench(args)


def _bench_decode(args: list[str]) -> int:
    from ringflash.bench.decode import main as bench

    return bench(args)


def _generate(args: list[str]) -> int:
    parser = argparse.ArgumentParser("ringflash generate", description="Continues a prompt with a trained model.")
    parser.add_argument("--checkpoint", required=True, help="folder, as in runs/tiny-cpu/checkpoints/last")
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=400, help="bytes to add (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(args)

    import torch

    from ringflash.train.checkpoint import load_decoder
    from ringflash.train.corpus import VOCAB_SIZE, decode, encode
    from ringflash.train.generate import generate

    if not options.prompt:
        raise ArgumentError("--prompt", expected="at least one character", got="none", remedy='Try "def ".')
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        got = f"{device}, without a CUDA device here" if device == "cuda" else device
        raise ArgumentError("--device", expected="auto, cpu or cuda", got=got, remedy="Leave --device out.")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = generate(
        load_decoder(options.checkpoint, dtype=dtype).to(device),
        torch.tensor(encode(options.prompt)),
        options.max_new_tokens,
        temperature=options.temperature,
        generator=torch.Generator().manual_seed(options.seed),
        vocab_size=VOCAB_SIZE,
    )
    print(options.prompt + decode(tokens))
    return 0


def _evaluate(args: list[str]) -> int:
    from ringflash.train.evaluate import main as evaluate

    return evaluate(args)


def _report(args: list[str]) -> int:
    from ringflash.train.report import main as report

    return report(args)


def _doctor(args: list[str]) -> int:
    argparse.ArgumentParser("ringflash doctor", description="Shows what is installed and what would run.").parse_args(
        [arg for arg in args if arg != "--debug"]
    )
    from ringflash.doctor import report

    report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
