"""Pages of docs: their programs run, their tables follow from the code, and their files for clusters parse."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import ringflash as rf
from ringflash import errors
from ringflash.commands.options import config_file
from ringflash.kernels import fallback
from ringflash.kernels.contract import ScoreConfig
from ringflash.kernels.decode_step import sight_of
from ringflash.kernels.eager.backend import EAGER
from ringflash.kernels.select import choose
from ringflash.kernels.triton.backend import DTYPES as TRITON_DTYPES
from tests.helpers.programs import output_of_text

ROOT = Path(rf.__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
PAGES = ("start/install.md", "start/first-steps.md", "start/concepts.md", "from-other-attention.md", "several-hosts.md")
PAGES += ("faq.md", "reference/support.md", "reference/remedies.md")
WHOLE = ("start/concepts.md", "from-other-attention.md", "faq.md")  # their blocks are one program
HOSTS = yaml.safe_load((ROOT / "configs" / "two-hosts.yaml").read_text())


def text_of(page: str) -> str:
    """Returns the text of a page of docs."""
    return (DOCS / page).read_text(encoding="utf-8")


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Returns the rows of the table whose first column has this heading: cells by the row's name in backticks."""
    lines = iter(text_of(page).splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            break
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name.strip("`")] = cells
    return rows


@pytest.mark.parametrize("page", WHOLE)
def test_the_blocks_of_a_page_run_as_one_program(page: str, tmp_path: Path) -> None:
    output_of_text("\n".join(BLOCK.findall(text_of(page))), tmp_path)


@pytest.mark.timeout(1200)
def test_the_first_steps_run(tmp_path: Path) -> None:
    on_cpu, on_gpu, on_ranks = BLOCK.findall(text_of("start/first-steps.md"))
    assert "rank 0" in output_of_text(on_cpu, tmp_path)
    assert output_of_text(on_gpu, tmp_path).split("\n")[0] == "(1, 4096, 8, 64) True"
    printed = output_of_text(on_ranks, tmp_path, ranks=2)
    assert sorted(re.findall(r"rank (\d): rows \((.*?)\)", printed)) == [
        ("0", "1, 2048, 8, 64"),
        ("1", "1, 2048, 8, 64"),
    ]


def test_every_page_with_blocks_is_run() -> None:
    assert {page for page in PAGES if BLOCK.search(text_of(page))} == {*WHOLE, "start/first-steps.md"}


def calls(page: str) -> Iterator[ast.Call]:
    """Yields the calls of names of `rf` in the text of a page outside of blocks."""
    for code in CODE.findall(re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)):
        if code.startswith("rf.") and "..." not in code:
            yield from (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("page", PAGES)
def test_calls_in_the_text_name_arguments_that_exist(page: str) -> None:
    for call in calls(page):
        target: Any = rf
        for name in ast.unparse(call.func).split(".")[1:]:
            target = getattr(target, name)
        names = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        inspect.signature(target).bind(*call.args, **dict.fromkeys(names))


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [*table("start/install.md", "extra")] == [*project["optional-dependencies"]]


MASKS: dict[str, rf.Full | Any] = {
    "Full": rf.Full(),
    "Causal": rf.Causal(),
    "SlidingWindow": rf.SlidingWindow(8),
    "Documents": rf.Documents([0, 4, 16]),
    "KeyPadding": rf.KeyPadding([9]),
    "PrefixLM": rf.PrefixLM([4]),
    "BlockSparse": rf.BlockSparse(torch.ones(2, 2, dtype=torch.bool), 8),
    "Tree": rf.Tree([-1, 0, 0]),
}


def passes(check: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a check raises no ArgumentError."""
    try:
        check(*args)
    except errors.ArgumentError:
        return False
    return True


def test_masks_run_where_the_table_says() -> None:
    found = {}
    for name, mask in MASKS.items():
        is_interval, has_tensors = mask.bitmap() is None, bool(mask.spec[1])
        found[name] = [is_interval, not has_tensors, passes(sight_of, mask, 3, 16)]
    assert {
        name: [cell == "yes" for cell in row] for name, row in table("reference/support.md", "mask").items()
    } == found


def test_options_run_where_the_table_says() -> None:
    slopes = torch.ones(2)
    configs = {
        "softmax_scale": ScoreConfig(0.5),
        "softcap": ScoreConfig(0.5, softcap=30.0),
        "alibi_slopes": ScoreConfig(0.5, alibi_slopes=slopes),
        "sinks": ScoreConfig(0.5, sinks=slopes),
        "dropout": ScoreConfig(0.5, dropout_p=0.1),
        "return_lse": ScoreConfig(0.5),
    }
    decodes = {*inspect.signature(rf.flash_decode).parameters, *inspect.signature(rf.DecodeOptions).parameters}
    q, cache, context = torch.zeros(1, 1, 2, 16), torch.zeros(1, 4, 2, 16), rf.ContextParallel.local(2)

    def sharded(name: str) -> None:
        given: dict[str, Any] = {name: slopes} if name in ("alibi_slopes", "sinks") else {}
        options = rf.DecodeOptions(**given)
        rf.flash_decode(q, cache, cache, cache_seqlens=2, context=context, options=options)

    found = {}
    for name, config in configs.items():
        backward = fallback.lacking_mode(config) is None
        forward = backward and config.sinks is None  # `HopperBackend.forward` refuses sinks
        found[name] = [forward, backward, name in decodes, name in decodes and passes(sharded, name)]
    rows = table("reference/support.md", "option")
    assert {name: [cell == "yes" for cell in row] for name, row in rows.items()} == found


def test_dtypes_run_where_the_table_says() -> None:
    found = {}
    for name in ("bfloat16", "float16", "float32", "float64"):
        dtype = getattr(torch, name)
        eager = choose("eager", torch.zeros(1, dtype=dtype)) is EAGER
        found[name] = [dtype in fallback.DTYPES, dtype in TRITON_DTYPES, eager]
    rows = table("reference/support.md", "dtype")
    assert {name: [cell == "yes" for cell in row] for name, row in rows.items()} == found


def test_every_error_has_a_row() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    assert {name: cells[0].strip("`") for name, cells in table("reference/remedies.md", "class").items()} == {
        kind.__name__: kind.__bases__[-1].__name__ for kind in kinds
    }


def check_run(arguments: list[str], hosts: str, processes: int = HOSTS["trainer"]["devices"]) -> None:
    """Checks a command of torchrun: a run of a configuration, on as many hosts and processes of each."""
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == "ringflash"
    assert parsed.nnodes == hosts
    assert int(parsed.nproc_per_node) == processes
    rest = ArgumentParser(allow_abbrev=False)
    rest.add_argument("command", nargs=2)
    rest.add_argument("--config")
    options, _ = rest.parse_known_args(parsed.training_script_args)
    assert options.command == ["train", "fit"]
    assert config_file(options.config).is_file()


def test_commands_for_several_hosts_parse() -> None:
    text = text_of("several-hosts.md").replace("\\\n", " ")
    commands = re.findall(r"^    torchrun (.*)$", text, re.MULTILINE)
    gpus = HOSTS["trainer"]["devices"]
    for command, hosts, processes in zip(commands, ("2", "1", "2"), (gpus, gpus, 1), strict=True):
        check_run(command.split(), hosts, processes)
    trainer = HOSTS["trainer"]
    sizes = table("several-hosts.md", "key")
    assert sizes["trainer.num_nodes`, `trainer.devices"][0] == f"{trainer['num_nodes']}, {trainer['devices']}"
    for name in ("context_parallel_size", "data_parallel_size", "replicate_size"):
        assert sizes[name][0] == str(trainer["strategy"]["init_args"][name])


def test_the_file_for_slurm_parses() -> None:
    path = DOCS / "examples" / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    trainer = HOSTS["trainer"]
    assert (asked["nodes"], asked["gpus-per-node"]) == (str(trainer["num_nodes"]), str(trainer["devices"]))
    assert asked["ntasks-per-node"] == "1"  # one torchrun a host
    command = text.replace("\\\n", " ").partition("=1 torchrun ")[2].strip()
    check_run([word.strip('"') for word in command.split()], "$SLURM_NNODES")


def test_the_files_for_kubernetes_parse() -> None:
    service, job = yaml.safe_load_all((DOCS / "examples" / "kubernetes.yaml").read_text())
    trainer, spec = HOSTS["trainer"], job["spec"]
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == trainer["num_nodes"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == trainer["devices"]
    first, *arguments = container["command"]
    assert first == "torchrun"
    check_run(arguments, str(trainer["num_nodes"]))
    name = job["metadata"]["name"]
    assert get_args_parser().parse_args(arguments).rdzv_endpoint.split(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
