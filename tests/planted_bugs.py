"""Plants known bugs in a copy of the tree, one after another, and reports whether the tests notice them.

    python -m tests.planted_bugs [--list] [--only NAME ...]

Each plant is an exact replacement of source text, and names the tests that must fail with it. The copy is first tested
as it is: a test that fails anyway proves nothing. The exit code is 1 when a bug goes unnoticed, 0 otherwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.helpers.names import ROOT

SUMMARY = "Plants known bugs in a copy of the tree and reports whether the tests notice them."
COPIED = ("configs", "kernels", "pyproject.toml", "ringflash", "tests", "train")
LIMIT = 600  # seconds for the tests of one plant, because a bug may make them hang


@dataclass(frozen=True)
class Plant:
    """A bug and the tests that must notice it.

    Args:
        name: name on the command line.
        origin: place where the bug occurred, and its effect for users.
        path: the file to change, relative to the repository's root.
        old: text that occurs exactly once in the file.
        new: text that replaces `old`.
        tests: pytest ids; each must fail.
    """

    name: str
    origin: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Changes the file under `root`; raises ValueError where `old` does not occur exactly once."""
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.path}, found it {count} times: {self.old}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


PLANTS = (
    Plant(
        "rounded-at-each-hop",
        "ring-flash-attention #42, torchtitan: partial outputs rounded to bf16, so the error grows with the ring",
        "kernels/eager/prefill.py",
        "= part.m, part.l, part.o\n",
        "= part.m, part.l, part.o.to(q.dtype)\n",
        ("tests/ring/test_schedule.py::test_error_does_not_grow_with_the_world[dtype0-False]",),
    ),
    Plant(
        "stale-keys-in-backward",
        "diffusers #14265: the backward uses the keys and values of another hop",
        "ringflash/ring/tiles.py",
        "keys, values = kv.keys_and_values(hop)",
        "keys, values = kv.keys_and_values(self._plan.hops[0])",
        ("tests/ring/test_schedule.py::test_error_does_not_grow_with_the_world[dtype2-False]",),
    ),
    Plant(
        "lse-of-one-chunk-in-backward",
        "tt-metal #53205: the backward normalises by each chunk of keys; dv is right, dq and dk are 10% off",
        "kernels/eager/prefill.py",
        "ds = dp.sub_(self.delta[..., None]).mul_(p)",
        "ds = dp.sub_(self.delta[..., None]).mul_(p / p.sum(-1, keepdim=True).clamp(min=1e-30))",
        ("tests/ring/test_schedule.py::test_every_mask_in_every_layout[full-zigzag-2]",),
    ),
    Plant(
        "odd-length-loses-a-token",
        "TransformerEngine #1930: a length that the ranks do not divide loses its last tokens",
        "ringflash/layouts/layout.py",
        "return [start + index * base + min(index, longer) for index in range(count + 1)]",
        "return [start + index * base + 0 * longer for index in range(count + 1)]",
        (
            "tests/layouts/test_layout.py::test_every_token_lives_on_one_rank",
            "tests/ring/test_schedule.py::test_any_length",
        ),
    ),
    Plant(
        "padding-read-as-rows",
        "TransformerEngine #3331: the rows that pad a shorter shard are read as keys",
        "ringflash/ring/buffers.py",
        "self._own if hop.kv_slot is None else self._views(hop.kv_slot, hop.rows)",
        "self._own if hop.kv_slot is None else self._views(hop.kv_slot, range(self._plan.slot_rows))",
        ("tests/ring/test_schedule.py::test_every_mask_in_every_layout[full-zigzag-2]",),
    ),
    Plant(
        "window-of-each-tile",
        "ring-flash-attention #35: a sliding window counts positions within the tile that a rank holds",
        "kernels/eager/mask_blocks.py",
        "piece = Chunk(chunk.start + offset,",
        "piece = Chunk(begin,",
        ("tests/ring/test_schedule.py::test_every_mask_in_every_layout[window-zigzag-2]",),
    ),
    Plant(
        "documents-ignored-on-a-ring",
        "axolotl #3608: packed documents see each other under context parallelism, and the loss is 1.83 times as large",
        "train/models/decoder.py",
        "return rf.ring_attention(q, k, v, step.context, mask=mask)",
        "return rf.ring_attention(q, k, v, step.context, mask=self.mask)",
        ("tests/train/models/test_decoder.py::test_documents_on_a_ring_do_not_see_each_other",),
    ),
    Plant(
        "contiguous-put-back-as-zigzag",
        "ms-swift #10071: shards of one layout are joined in the order of another",
        "ringflash/context.py",
        "return layouts.put_together(x, self._local_chunks(x.shape[dim], mask), dim)",
        "return layouts.put_together(x, ContextParallel.local(self.world_size)._local_chunks(x.shape[dim], mask), dim)",
        ("tests/layouts/test_layout.py::test_shard_and_unshard_round_trip",),
    ),
    Plant(
        "nan-of-a-masked-rank",
        "Megatron-LM #1764: the loss of a rank whose tokens are all masked is 0 / 0",
        "train/lightning/ring_module.py",
        '"loss": losses.total / num_valid.clamp(min=1)',
        '"loss": losses.total / (batch["labels"] >= 0).sum() * (batch["labels"] >= 0).sum() / num_valid',
        ("tests/train/lightning/test_language_model.py::test_a_shard_of_masked_tokens_has_loss_0",),
    ),
    Plant(
        "mean-of-no-token",
        "Megatron-LM #1764: the mean over no valid token is NaN",
        "train/models/linear_loss.py",
        "return losses.sum(), losses",
        "return losses[labels != IGNORE_INDEX].mean() * (labels != IGNORE_INDEX).sum(), losses",
        ("tests/train/models/test_linear_loss.py::test_no_valid_token",),
    ),
    Plant(
        "divided-by-the-shards-tokens",
        "Megatron-LM #7452: a rank divides its loss by its own valid tokens, not by those of all ranks",
        "train/lightning/ring_module.py",
        '"loss": losses.total / num_valid.clamp(min=1)',
        '"loss": losses.total / (batch["labels"] >= 0).sum().clamp(min=1)',
        ("tests/train/lightning/test_language_model.py::test_a_shard_s_loss_counts_the_valid_tokens_of_all_ranks",),
    ),
    Plant(
        "evaluation-loss-times-the-ranks",
        "transformers #48167: the logged evaluation loss is multiplied by the context-parallel size",
        "train/lightning/ring_module.py",
        'reduce_fx="max"',
        'reduce_fx="sum"',
        ("tests/train/lightning/test_strategy.py::test_batches_random_numbers_and_what_callbacks_read",),
    ),
    Plant(
        "overflow-in-the-merge",
        "ring implementations that merge by exp(lse1) + exp(lse2): large scores overflow",
        "ringflash/state.py",
        "m = torch.maximum(self.m, other.m)",
        "m = torch.minimum(self.m, other.m)",
        ("tests/test_state.py::test_large_scores_do_not_overflow",),
    ),
    Plant(
        "nan-in-the-merge",
        "ring implementations that merge by sigmoid(lse2 - lse1): two empty states give -inf minus -inf",
        "ringflash/state.py",
        "shift = m.masked_fill(m == -math.inf, 0.0)",
        "shift = m",
        ("tests/test_state.py::test_identity_meets_identity_without_nan",),
    ),
    Plant(
        "nan-in-a-tile",
        "the same in a tile: a row that has seen no key yet",
        "kernels/eager/prefill.py",
        "shift = m_new.masked_fill(m_new == -math.inf, 0.0)",
        "shift = m_new",
        ("tests/ops/test_attention.py::test_rows_that_see_nothing",),
    ),
    Plant(
        "nan-in-the-triton-forward",
        "the same in the Triton kernel",
        "kernels/triton/forward.py",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "shift = m_new",
        ("tests/kernels/test_masks.py::test_rows_that_see_nothing[triton]",),
    ),
    Plant(
        "bfloat16-gradient-for-float16",
        "a kernel wrapper that ends in dq.to(bfloat16): three bits of a float16 gradient are lost",
        "kernels/contract.py",
        "else total.to(self.q.dtype)",
        "else total.to(torch.bfloat16)",
        ("tests/ring/test_schedule.py::test_accuracy[float16-2-zigzag-full]",),
    ),
    Plant(
        "bfloat16-gradient-for-float16-in-the-deterministic-path",
        "the same where dq is summed in one order",
        "ringflash/ring/tiles.py",
        "self._dq.to(self._q.dtype)",
        "self._dq.to(torch.bfloat16)",
        ("tests/ring/test_schedule.py::test_accuracy_of_the_deterministic_backward[2-dtype0]",),
    ),
    Plant(
        "dq-summed-in-the-inputs-dtype",
        "dq rounded to the inputs' dtype at each hop of the deterministic backward: RMS error up by 44% at 8 ranks",
        "ringflash/ring/tiles.py",
        "dtype = q.dtype if rounds_once else kernels.state_dtype(q.dtype)",
        "dtype = q.dtype",
        ("tests/ring/test_schedule.py::test_error_does_not_grow_with_the_world[dtype0-True]",),
    ),
    Plant(
        "checkpointing-runs-the-ring-again",
        "torchtitan #1522: full activation checkpointing repeats the collectives of attention",
        "train/models/activations.py",
        "KEPT = [torch.ops.ringflash.attention.default]",
        "KEPT = []",
        ("tests/train/models/test_activations.py::test_virtual_ranks_are_recomputed_without_their_ring",),
    ),
    Plant(
        "lengths-not-compared",
        "gloo: a sender shorter than its receiver raises nothing and leaves the receiver's tail as it was",
        "ringflash/context.py",
        "if tuple(lengths) != expected:",
        "if len(lengths) != len(expected):",
        ("tests/transport/test_process_group.py::test_ranks_that_differ_all_raise",),
    ),
    Plant(
        "dtypes-not-compared",
        "gloo: bf16 sent into fp16 is reinterpreted without an error",
        "ringflash/ops/ring_call.py",
        '"dtype": str(q.dtype),',
        '"dtype": "any",',
        ("tests/transport/test_process_group.py::test_half_precisions_that_differ",),
    ),
    Plant(
        "a-killed-peer-is-not-named",
        "gloo: the message of a survivor names no rank",
        "ringflash/coordination/failures.py",
        "peers = gone or sorted(waited_for & {*missing}) or missing or behind or sorted(waited_for)",
        "peers = [r for r in range(world_size) if r != rank]",
        ("tests/coordination/test_failures.py::test_reports_of_ranks",),
    ),
    Plant(
        "connections-left-open",
        "a ring that breaks keeps its connections: descriptors leak, and peers wait for their deadline",
        "ringflash/transport/connect.py",
        "faults.on_break(lambda: gloo.close(own))",
        "faults.on_break(lambda: None)",
        ("tests/coordination/test_failures.py::test_a_broken_ring_closes_its_connections",),
    ),
    Plant(
        "batch-that-hangs",
        "pytorch #174288: a batch of isend and irecv hangs under load; here it must end at the deadline",
        "ringflash/coordination/failures.py",
        "if waited >= self.deadline:",
        "if waited >= 1e9:",
        ("tests/coordination/test_watch.py::test_a_message_that_does_not_come",),
    ),
    Plant(
        "all-ranks-send-first",
        "the same over a backend that takes one operation after another: neighbours that both send first block",
        "ringflash/transport/nccl.py",
        "key=lambda message: message.sends == (rank % 2 == 1)",
        "key=lambda message: not message.sends",
        ("tests/transport/test_process_group.py::test_of_two_neighbours_one_sends_first",),
    ),
    Plant(
        "deadline-after-the-launchers",
        "nccl #2353: the launcher ends the job before the watchdog has dumped anything",
        "ringflash/transport/connect.py",
        "if not 0 < seconds < limit.total_seconds():",
        "if not 0 < seconds:",
        ("tests/coordination/test_failures.py::test_deadlines_in_the_wrong_order",),
    ),
    Plant(
        "unequal-numbers-of-batches",
        "data-parallel groups with unequal numbers of batches call unlike collectives, and gloo aborts the processes",
        "train/lightning/user_modules.py",
        "progress.is_last_batch or ends_run)",
        "ends_run)",
        ("tests/train/lightning/test_unequal_batches.py::test_every_rank_names_the_places_of_all[accumulation]",),
    ),
    Plant(
        "fsync-left-out",
        "a checkpoint renamed before its files are on the disk: a power cut leaves empty files under its name",
        "train/checkpoint/manifest.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        ("tests/train/checkpoint/test_manifest.py::test_a_checkpoint_is_on_the_disk_before_it_has_its_name",),
    ),
    Plant(
        "calls-with-nulls-of-other-calls",
        "prepare --chat: tables give each call the arguments of all other functions, as nulls",
        "train/data/chat.py",
        "self._render_row(without_nulls(row) if is_table else row)",
        "self._render_row(row)",
        ("tests/train/data/test_chat.py::test_tables_give_a_call_no_arguments_of_other_calls",),
    ),
    Plant(
        "another-reference",
        "dpo: a run resumes with another reference, and compares with a model that it did not begin with",
        "train/preference/module.py",
        "if saved != own:",
        "if own is None:",
        ("tests/train/preference/test_module.py::test_another_reference_is_refused",),
    ),
    Plant(
        "another-length-another-model",
        "export --max-position-embeddings: longrope and dynamic scaling depend on the length that it writes",
        "train/commands/export.py",
        "if before != longest and (tables or _rope_follows_length(config.get_text_config())):",
        "if before != longest and tables:",
        ("tests/train/commands/test_export.py::test_another_length_is_refused_where_it_would_change_the_model",),
    ),
)


def run_tests(tests: Sequence[str], root: Path) -> tuple[int, dict[str, str]]:
    """Runs pytest ids in the tree `root`; returns pytest's exit code, and the message of each id that failed."""
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -1, {}
    if process.returncode not in (0, 1):
        print(output.decode(errors="replace"))
    return process.returncode, failures(report, tests)


def failures(report: Path, tests: Sequence[str]) -> dict[str, str]:
    """Returns the ids in `tests` that have a failed case in pytest's JUnit report, with the case's message."""
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        for problem in (*case.iter("failure"), *case.iter("error")):
            path, name = case.get("classname", "").replace(".", "/") + ".py", case.get("name", "")
            for test in (f"{path}::{name}", f"{path}::{name.partition('[')[0]}"):
                failed.setdefault(test, " ".join(problem.get("message", "").split()))
    return {test: failed[test] for test in tests if test in failed}


def copy_tree(root: Path) -> None:
    """Copies the files that the tests read into the folder `root`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, root / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, root / name)


def try_plant(plant: Plant, root: Path) -> tuple[bool, str]:
    """Plants the bug in the copy `root`, runs its tests, and removes it again.

    Returns whether every test failed, and the tests' messages or the reason why the run proves nothing.
    """
    file = root / plant.path
    original = file.read_bytes()
    plant.apply(root)
    try:
        code, failed = run_tests(plant.tests, root)
    finally:
        file.write_bytes(original)
    if code == -1:
        return False, f"the tests did not end within {LIMIT} s"
    if code not in (0, 1):
        return False, f"pytest ended with {code}: the tests did not run"
    passed = [test for test in plant.tests if test not in failed]
    if passed:
        return False, f"passed with the bug: {', '.join(passed)}"
    return True, "\n      ".join(shortened(message) for message in failed.values())


def shortened(message: str) -> str:
    """Returns the two ends of a long message, because the error of a rank's traceback is at the end."""
    return message if len(message) <= 200 else f"{message[:90]} ... {message[-100:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_bugs", description=SUMMARY)
    parser.add_argument("--list", action="store_true", help="list the bugs and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[p.name for p in PLANTS], help="plant these alone")
    options = parser.parse_args(arguments)
    plants = [plant for plant in PLANTS if options.only is None or plant.name in options.only]
    if options.list:
        for plant in plants:
            print(f"{plant.name}: {plant.origin}\n    {plant.path}; {', '.join(plant.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="ringflash-plants-") as folder:
        root = Path(folder)
        copy_tree(root)
        code, failed = run_tests(sorted({test for plant in plants for test in plant.tests}), root)
        if code != 0:
            print(f"The tests do not pass without a bug (pytest ended with {code}): {', '.join(sorted(failed))}")
            return 1
        unnoticed = 0
        for plant in plants:
            started = time.monotonic()
            noticed, text = try_plant(plant, root)
            unnoticed += not noticed
            seconds = time.monotonic() - started
            print(f"{'red' if noticed else 'GREEN':5} {plant.name} ({seconds:.0f} s)\n      {text}", flush=True)
    print(f"{len(plants) - unnoticed} of {len(plants)} bugs were noticed.")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
