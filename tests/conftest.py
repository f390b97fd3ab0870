"""Set-up of all tests: without a GPU, Triton kernels run in the interpreter. This is set before Triton is imported."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit a handler that ignores SIGINT
torch.set_num_threads(1)  # several processes share the cores


def _patch_the_language_once() -> None:
    """Patches Triton's language once: the interpreter does so at each device function call, a third of its time."""
    from triton import language
    from triton.runtime import interpreter

    patch, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is not None and scope is not None:  # another version of Triton lacks them and stays slow
        patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        setattr(interpreter, "_patch_lang", lambda _: scope())  # noqa: B010 - private


def _keep_scalar_masks_boolean() -> None:
    """Keeps blocks made of scalar comparisons boolean: Triton 3.9.0 makes them integers, then refuses them as masks."""
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        block = original(self, *args)
        if args[-1].data.dtype == bool and block.data.dtype != bool:
            return TensorHandle(block.data.astype(bool), language.int1)
        return block

    setattr(InterpreterBuilder, "create_splat", create_splat)  # noqa: B010 - private


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_the_language_once()
    _keep_scalar_masks_boolean()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by timeout, longest first, so that no long test runs alone on one worker at the end."""

    def given(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return timeout.args[0] if timeout is not None else 0.0

    items.sort(key=given, reverse=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _release_gpu_memory() -> Iterator[None]:
    """Returns cached memory of the GPU after each test, because many test processes share it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**28:
        torch.cuda.empty_cache()
