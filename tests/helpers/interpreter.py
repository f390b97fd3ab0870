"""Changes of Triton's interpreter for tests: kernels run in a sixth of the time, and a fault of Triton 3.9.0 is mended.

The interpreter makes types, shapes and tensors in Python for each operator of each program. Here they are made once for
each dtype or shape, and in `operators.py` once for the types of operands. Names are private to Triton, checked with
3.6.0, 3.7.1 and 3.9.0: where a version lacks one, or makes other objects, it stays slow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.helpers import operators

TENSOR = ("handle", "shape", "numel", "type", "dtype")  # attributes of tensors


def prepare() -> None:
    """Makes all changes; the interpreter is in use from then on, so call it where TRITON_INTERPRET is 1."""
    _leave_out_overflow_checks()
    _patch_the_language_once()
    _look_up_numpy_dtypes()
    _check_shapes_once()
    _share_shapes_of_tensors()
    _keep_scalar_masks_boolean()
    if _patched_for_good() and _made_of_known_parts():
        operators.install()


def _leave_out_overflow_checks() -> None:
    """Leaves out checks of integer overflow: without the option `debug` the interpreter computes them, then drops them.

    They take a quarter of its time.
    """
    builder: Any = interpreter.interpreter_builder
    if getattr(builder.options, "debug", True) is False and hasattr(builder.options, "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once() -> None:
    """Patches Triton's language once: the interpreter does so at each device function call, a third of its time."""
    patch, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is not None and scope is not None:
        setattr(interpreter, "_patch_attr", _patch_builtin)  # noqa: B010 - private
        patch(SimpleNamespace(__globals__={"tl": language, "core": core}))
        setattr(interpreter, "_patch_lang", lambda _: scope())  # noqa: B010 - private


def _patch_builtin(owner: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """Replaces a function of Triton's language by one that passes the interpreter to it."""
    function = getattr(member, "__wrapped__", member)  # without the check that an interpreter is passed
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _patched_for_good() -> bool:
    """Returns whether the language stays patched between kernels."""
    return not getattr(core.tensor.__add__, core.TRITON_BUILTIN, False)


def _made_of_known_parts() -> bool:
    """Returns whether tensors have the parts that `operators.py` makes them of."""
    tensor = core.tensor(TensorHandle(np.zeros(1, np.int32), core.int32), core.int32)
    return _same_attributes(tensor, TENSOR) and _same_attributes(tensor.handle, ("data", "dtype", "attr"))


def _look_up_numpy_dtypes() -> None:
    """Keeps the NumPy dtype of each scalar type: the interpreter makes a table of all of them for each tensor."""
    original = getattr(interpreter, "_get_np_dtype", None)
    if original is None:
        return
    of_scalar = cache(original)

    def get_np_dtype(of: Any) -> Any:
        scalar = of.scalar
        return original(scalar) if scalar.is_ptr() else of_scalar(scalar)  # types of pointers have no hash

    setattr(interpreter, "_get_np_dtype", get_np_dtype)  # noqa: B010 - private


def _check_shapes_once() -> None:
    """Checks the shape of a block, and counts its elements, once for each shape."""
    original: Any = core.block_type.__init__
    if not _same_attributes(core.block_type(core.int1, [2]), ("element_ty", "shape", "numel", "name")):
        return

    @cache
    def checked(*shape: int) -> tuple[Any, int]:
        block = object.__new__(core.block_type)
        original(block, core.int1, list(shape))
        return block.shape, block.numel

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = checked(*shape)
        self.name = f"<{self.shape}, {element_ty}>"

    setattr(core.block_type, "__init__", init)  # noqa: B010 - a method of Triton's


def _share_shapes_of_tensors() -> None:
    """Gives tensors of one shape the same objects for it, which nothing changes."""
    if not _same_attributes(core.tensor(None, core.int32), TENSOR):
        return

    @cache
    def constants(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(*(type.shape if type.is_block() else ()))

    setattr(core.tensor, "__init__", init)  # noqa: B010 - a method of Triton's


def _same_attributes(made: object, names: tuple[str, ...]) -> bool:
    """Returns whether an object of Triton's has these attributes and no others."""
    return {*vars(made)} == {*names}


def _keep_scalar_masks_boolean() -> None:
    """Keeps blocks made of scalar comparisons boolean: Triton 3.9.0 makes them integers, then refuses them as masks."""
    original = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        block = original(self, *args)
        if args[-1].data.dtype == bool and block.data.dtype != bool:
            return TensorHandle(block.data.astype(bool), language.int1)
        return block

    setattr(InterpreterBuilder, "create_splat", create_splat)  # noqa: B010 - private
