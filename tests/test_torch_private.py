"""Private names of torch: each behaves as the library needs, and one file uses them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)
from torch.utils import _pytree

import ringflash
from ringflash import torch_private
from tests.helpers.frames import frames_of
from tests.helpers.private_names import is_private, private_imports

ROOT = Path(ringflash.__file__).parent

# Private attributes of objects that are not torch's, and the owner of each.
OTHERS = {
    "_attn_implementation": "the configuration of a transformers model",
    "_convert_to_ir_values": "Gluon, in kernels/versions.py",
    "_exit": "os",
    "_fields": "a named tuple, documented",
    "_reinterpret": "Gluon, in kernels/versions.py",
    "_keys_to_ignore_on_load_missing": "a transformers model",
    "_keys_to_ignore_on_load_unexpected": "a transformers model",
    "_replace": "a named tuple, documented",
    "_asdict": "a named tuple, documented",
    "_weight_conversions": "a transformers model",
}
# Private attributes of the library's own objects, which another file defines: a context's, and a RingModule's.
OF_OTHER_FILES = {"ops/decode_op.py": {"_control"}, "train/checkpoint/load.py": {"_decoder"}}
OF_OBJECTS = {"getattr", "hasattr", "setattr", "delattr"}


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a file defines: functions, classes, fields and attributes of self."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case _:
                pass
    return names


def private_names(tree: ast.AST, of_library: set[str]) -> set[str]:
    """The private names of torch, or of unknown owners, that a file uses.

    An attribute of another object than self is known where its own file defines it; of self, where any file does, as
    the class may inherit it.
    """
    found = private_imports(tree, "torch")
    of_file = own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if is_private(name):
                found |= {name} - of_library - set(OTHERS)
            case ast.Attribute(attr=name) if is_private(name):
                found |= {name} - of_file - set(OTHERS)
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                if function in OF_OBJECTS and is_private(name):
                    found |= {name} - of_file - set(OTHERS)
            case _:
                pass
    return found


def files() -> list[Path]:
    """All files of the library, the kernels and the trainer.

    The benchmarks are left out: they set up other implementations of attention, which torch keeps among its
    experiments, and read the profiler. No user's call or run depends on that.
    """
    found = [path for folder in (ROOT, ROOT / "kernels", ROOT / "train") for path in folder.rglob("*.py")]
    return sorted({path for path in found if not path.is_relative_to(ROOT / "bench")})


def test_one_file_uses_private_names_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in files()}
    of_library = set().union(*map(own_names, trees.values()))
    found = {str(path.relative_to(ROOT)): private_names(tree, of_library) for path, tree in trees.items()}
    assert found.pop("torch_private.py")
    assert found.pop("train/lightning_private.py")
    assert found.pop("train/torchao_private.py")
    assert found.pop("train/accelerate_private.py")
    assert {file: names for file, names in found.items() if names} == OF_OTHER_FILES


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import x",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "torch._C._x()",
        "group._get_backend(device)",
        "options._timeout = 1",
        "class A(nn.Module):\n    def f(self): return self._parameters",
        "getattr(x, '_version')",
    ],
)
def test_the_scan_finds(code: str) -> None:
    tree = ast.parse(code)
    assert private_names(tree, own_names(tree))


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def f(self): self._x = 1\n    def g(self, other): return other._x",
        "from torch import nn\nx.__dict__",
        "call._replace(x=1)",
    ],
)
def test_the_scan_leaves_own_names(code: str) -> None:
    tree = ast.parse(code)
    assert not private_names(tree, own_names(tree))


def test_this_torch_was_checked() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    assert release in torch_private.CHECKED, (
        f"torch {release} is new: if the other tests pass under it, on GPUs too, add it to torch_private.CHECKED"
    )


def test_names_of_every_call_add_no_frame() -> None:
    x = torch.ones(2)

    def call() -> None:
        torch_private.are_transforms_active()
        torch_private.forward_mode_level()
        torch_private.assert_async(x.all(), "all")
        torch_private.copy_each([x], [x])

    assert {name for _, name in frames_of(call)} <= {"call"}


def test_transforms_are_active_inside_of_them_only() -> None:
    seen: list[bool] = []

    def total(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.are_transforms_active())
        return x.sum()

    x = torch.ones(2)
    total(x)
    torch.func.grad(total)(x)
    torch.func.vmap(total)(x)
    total(x)
    assert seen == [False, True, True, False]


def test_the_level_of_forward_mode() -> None:
    assert torch_private.forward_mode_level() == -1
    with forward_ad.dual_level():
        assert torch_private.forward_mode_level() == 0
    assert torch_private.forward_mode_level() == -1


def test_observers_of_operators_are_known_inside_of_them_only() -> None:
    def observed() -> list[bool]:
        traced = torch_private.jit_tracing_state() is not None
        modes = torch_private.dispatch_modes() > 0, torch_private.function_modes() > 0
        return [*modes, torch_private.is_profiling(), torch_private.is_any_autocast_enabled(), traced]

    outside = [False] * 5
    assert observed() == outside
    with torch_private.TorchDispatchMode():
        assert observed() == [True, False, False, False, False]
    with torch.overrides.TorchFunctionMode():
        assert observed() == [False, True, False, False, False]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert observed() == [False, False, True, False, False]
    with torch.autocast("cpu", torch.bfloat16):
        assert observed() == [False, False, False, True, False]
    assert observed() == outside


def test_an_asynchronous_assertion_raises_its_message() -> None:
    torch_private.assert_async(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="the reason"):
        torch_private.assert_async(torch.tensor(False), "the reason")


def test_copies_go_to_the_first_list() -> None:
    targets, sources = [torch.zeros(2, 3), torch.zeros(4)], [torch.randn(3, 2).T, torch.randn(4)]
    torch_private.copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_each_tensor_is_multiplied_in_place() -> None:
    each = [torch.ones(2), torch.ones(3)]
    torch_private.multiply_each(each, torch.tensor(2.0))
    assert [x.tolist() for x in each] == [[2, 2], [2, 2, 2]]


def test_a_mode_sees_operators_below_autograd() -> None:
    seen: list[Any] = []

    class Recorder(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.ones(2, requires_grad=True).sum()
    assert torch.ops.aten.sum.default in seen


def test_the_leaves_of_a_tree() -> None:
    assert torch_private.tree_leaves(((1, [2]), {"a": 3, "b": (4,)})) == [1, 2, 3, 4]


class _Kept(dict[str, int]):
    """A dict that no other test registers."""

    note = ""


def test_trees_enter_a_dict_of_a_class_of_ones_own() -> None:
    def make(entries: dict[str, int], note: Any) -> _Kept:
        kept = _Kept(entries)
        kept.note = note
        return kept

    original = make({"a": 1, "b": 2}, "x")
    assert torch_private.tree_leaves([original]) == [original]
    torch_private.enter_dicts(_Kept, lambda kept: kept.note, make)
    assert torch_private.tree_leaves([original]) == [1, 2]
    (copy,) = _pytree.tree_map(lambda x: x + 1, [original])
    assert copy == {"a": 2, "b": 3}
    assert copy.note == "x"
    assert _pytree.tree_structure(copy) == _pytree.tree_structure(original)
    assert _pytree.tree_structure(copy) != _pytree.tree_structure(make({"a": 1, "b": 2}, "y"))
    assert _pytree.tree_map_with_path(lambda path, x: _pytree.keystr(path), original) == {"a": "['a']", "b": "['b']"}


def test_the_table_of_buffers_is_the_modules_own() -> None:
    module = nn.BatchNorm1d(2)
    mean = torch.ones(2)
    table = torch_private.buffers_of(module)
    assert list(table) == ["running_mean", "running_var", "num_batches_tracked"]
    del module.running_mean
    table["running_mean"] = mean
    assert module.running_mean is mean


def test_a_compiled_module_is_known() -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


def test_changes_in_place_are_counted() -> None:
    x = torch.zeros(2)
    before = torch_private.version_of(x)
    x.add_(1)
    x[:1].mul_(2)
    assert torch_private.version_of(x) == before + 2


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone."""
    if dist.is_initialized():  # a trainer leaves its group until the process exits
        dist.destroy_process_group()
    dist.init_process_group("cpu:gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_timeouts_are_read(world: dist.ProcessGroup) -> None:
    assert set(torch_private.timeouts_of(world)) == {timedelta(seconds=77)}


def test_a_number_names_a_group_alike_whatever_groups_a_process_has(world: dist.ProcessGroup) -> None:
    """Ranks with other groups of their own give a group of the same ranks the same name."""

    def name_of(number: int | None) -> str:
        with nullcontext() if number is None else torch_private.numbered_group(number):
            group = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        dist.destroy_process_group(group)
        return group.group_name

    assert torch_private.number_of_groups() == 1
    first, own = name_of(7), name_of(None)
    assert first != own
    assert name_of(8) not in (first, own)
    more: list[Any] = [dist.new_group([0]), dist.new_group([0], use_local_synchronization=True)]
    assert torch_private.number_of_groups() == 3
    assert name_of(7) == first
    assert torch_private.number_of_groups() == 3
    for group in more:
        dist.destroy_process_group(group)


def test_a_numbered_group_leaves_the_names_of_later_groups_alone(world: dist.ProcessGroup) -> None:
    def later() -> list[str]:
        """The names of the next two groups, which are counted from the same number on."""
        counts = distributed_c10d._world.group_count
        groups: list[Any] = [dist.new_group([0], use_local_synchronization=local) for local in (False, True)]
        names = [group.group_name for group in groups]
        for group in groups:
            dist.destroy_process_group(group)
        distributed_c10d._world.group_count = counts
        return names

    before = later()
    with torch_private.numbered_group(5):
        group: Any = dist.new_group([0], use_local_synchronization=True)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="in between"), torch_private.numbered_group(5):
        raise ValueError("in between")
    assert later() == before


def test_the_store_of_the_default_group_is_public(world: dist.ProcessGroup) -> None:
    """`transport.connect` and the trainer's `Shutdown` reach other ranks through it."""
    store = world.get_group_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_one_backend_is_aborted(world: dist.ProcessGroup) -> None:
    torch_private.abort(world, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="No backend"):
        torch_private.abort(world, torch.device("cuda"))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build of torch without NCCL")
def test_the_timeout_of_options_is_set() -> None:
    options = dist.ProcessGroupNCCL.Options()
    torch_private.set_timeout(options, timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)


def test_memory_is_shared_between_gpus_alone() -> None:
    """The functions take these arguments: others would raise a TypeError. The transport's tests run them on GPUs."""
    store = HashStore()
    group = torch_private.name_group("of this test", 0, 1, store)
    assert (group.rank(), group.size()) == (0, 1)
    with pytest.raises(RuntimeError):
        torch_private.allocate_shared(64, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        torch_private.share(torch.zeros(64, dtype=torch.uint8), "of this test")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of a GPU")
def test_shared_memory_is_read_by_rank() -> None:
    own = torch_private.allocate_shared(2**21, torch.device("cuda", 0))
    assert (own.shape, own.dtype) == ((2**21,), torch.uint8)
    store = HashStore()
    group = torch_private.name_group("of one GPU", 0, 1, store)
    assert group.size() == 1
    own.fill_(7)
    assert torch_private.share(own, "of one GPU").get_buffer(0, (4,), torch.uint8).tolist() == [7] * 4


def test_the_place_of_data_has_the_fields_that_a_writer_stores() -> None:
    place = torch_private.storage_info("file", 3, 5)
    assert (place.relative_path, place.offset, place.length) == ("file", 3, 5)
