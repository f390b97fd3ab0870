"""Behavioural check of transformers models: cutting a sequence over ranks must not change the results.

The model runs on a few tokens in their own order, and then in the order of a ring. Each attention call of the later run
must get the queries, keys and values of the first run, and returns the first run's output. Rounding errors therefore do
not add up over layers, and any dependence on the order of rows outside of attention shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ringflash import reference
from ringflash.context import ContextParallel
from ringflash.errors import ArgumentError
from ringflash.integrations.transformers.rope import rotary_modules
from ringflash.masks import Mask, as_mask
from ringflash.torch_private import buffers_of, is_compiled, version_of

TOKENS = 16
RANKS = 2
ONE_DEVICE = 'Choose another model for a ring; this one runs on one device with attn_implementation="sdpa".'
NOT_THE_MODELS = (torch.OutOfMemoryError, torch.distributed.DistError)


@dataclass(frozen=True)
class Checked:
    """Findings of a check, kept on the model as `_ring_checked`.

    Args:
        rotary: names of the modules whose RoPE depends on the largest position.
    """

    rotary: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in the first run.

    Args:
        inputs: q, k and v, each (batch, nheads, seqlen, width).
        visible: bool (batch | 1, seqlen, seqlen), the keys that each row sees.
        modes: softmax scale and softcap.
        out: (batch, seqlen, nheads, headdim_v).
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    visible: Tensor
    modes: tuple[float | None, float]
    out: Tensor


@dataclass
class Witness:
    """Stands in for a context during the check. It records attention calls, or compares them with a recording.

    Args:
        recorded: calls of the first run; None means that this run records them.
        order: positions of the rows, in the order of this run.
        context: virtual ranks of this run; None means that the rows are in order.
        any_positions: whether this run has positions that fit no mask.
        calls: calls so far.
        positions: for each call, whether position_ids reached it.
        difference: the first difference from the recording, in words.
    """

    recorded: list[AttentionCall] | None
    order: Tensor
    context: ContextParallel | None = None
    any_positions: bool = False
    calls: list[AttentionCall] = field(default_factory=list)
    positions: list[bool] = field(default_factory=list)
    difference: str | None = None

    def attend(
        self, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask | None, modes: tuple[float | None, float]
    ) -> Tensor:
        """Returns attention's output (batch, seqlen, nheads, headdim_v).

        Args:
            inputs: q, k and v, each (batch, nheads, seqlen, width).
            mask: over the whole sequence.
            modes: softmax scale and softcap.
        """
        q, k, v = (x.transpose(1, 2) for x in inputs)
        rows = torch.arange(k.shape[1], device=q.device)
        visible = rows.new_zeros(()) if self.any_positions else as_mask(mask).dense(rows[-q.shape[1] :], rows)
        if self.recorded is None:
            scale, softcap = modes
            out, _ = reference.attention(q, k, v, mask=mask, softmax_scale=scale, softcap=softcap)
            self.calls.append(AttentionCall(inputs, visible, modes, out))
            self.positions.append(True)
            return out.contiguous()
        index = len(self.calls)
        if index >= len(self.recorded):
            self.note("it calls attention more often")
            return v.new_zeros(*q.shape[:3], v.shape[3])
        first = self.recorded[index]
        self.calls.append(first)
        for name, got, expected in zip("qkv", inputs, first.inputs, strict=True):
            if not _same_rows(got, expected, self.order, dim=2):
                self.note(f"{name} of attention call {index} differs")
        if not self.any_positions and (not torch.equal(visible, first.visible) or modes != first.modes):
            self.note(f"the mask, scale or softcap of attention call {index} differs")
        return first.out[:, self.order].to(q.dtype) if first.out.shape[1] == len(self.order) else first.out

    def note(self, difference: str) -> None:
        """Keeps `difference`, unless an earlier one is known."""
        self.difference = self.difference or difference


def check(model: nn.Module, layers: int) -> Checked:
    """Runs the model on 16 tokens: with given positions, with its own positions, and in the order of two zigzag ranks.

    Under FSDP the check is a collective, as any forward is. It leaves the training state, buffers, random numbers and
    autocast's cache unchanged.

    Args:
        model: a transformers model with this library's attention.
        layers: lowest number of attention calls in a forward.

    Raises:
        ArgumentError: the model's results would be wrong on a ring, or it cannot run.
    """
    name, device = type(model).__name__, next(model.parameters()).device
    tokens = _token_ids(model.config).to(device)
    rows, context = torch.arange(TOKENS, device=device), ContextParallel.local(RANKS)
    zigzag = context.positions(TOKENS, device=device)

    def run(witness: Witness, positions: Tensor | None) -> Tensor:
        given = {} if positions is None else {"position_ids": positions[None]}
        try:
            output = model(input_ids=tokens[:, witness.order], use_cache=False, ring_context=witness, **given)
        except NOT_THE_MODELS:
            raise
        except (ArgumentError, TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
            about_ring = isinstance(error, ArgumentError) or "keyword argument" in str(error)
            raise ArgumentError(
                "model",
                expected=f"a model that can run on {TOKENS} tokens with position_ids and ring_context",
                got=f"{name}, whose forward raised {type(error).__name__}: {str(error).rstrip('.')}",
                remedy=ONE_DEVICE if about_ring else "Repair the model or its configuration; its own error is above.",
            ) from error
        result = output if isinstance(output, Tensor) else output[0]
        if result.ndim < 3 or result.shape[1] != TOKENS:
            raise ArgumentError(
                "model",
                expected=f"a model that returns a row for each of {TOKENS} tokens",
                got=f"{name}, which returns {tuple(result.shape)}",
                remedy="Call the model that is inside it, and pool the rows of all ranks.",
            )
        return result

    with _undisturbed(model):
        first = Witness(None, rows)
        expected = run(first, rows)
        if len(first.calls) < layers:
            raise ArgumentError(
                "model",
                expected=f"ring_context in the attention of {layers} layers",
                got=f"{name}, where it comes to {len(first.calls)}",
                remedy="Choose a model whose layers all hand the keywords of forward to transformers' attention "
                f"interface. {ONE_DEVICE}",
            )

        def difference(witness: Witness, positions: Tensor | None) -> str | None:
            witness.recorded = first.calls
            if not _same_rows(run(witness, positions), expected, witness.order, dim=1):
                witness.note("the result differs")
            return witness.difference

        if (why := difference(Witness(None, rows), None)) is not None:
            raise ArgumentError(
                "model",
                expected="a model that counts positions from 0",
                got=f"{name}: {why} when the positions 0, 1, 2, ... are given",
                remedy=f"It begins its positions elsewhere, such as behind its padding token's id. {ONE_DEVICE}",
            )
        if (why := difference(Witness(None, zigzag, context), zigzag)) is None:
            return Checked(rotary_modules(model))
        if difference(Witness(None, rows, any_positions=True), rows.flip(0)) is None:
            expected_model, reason = "a model that uses position_ids", "which ignores them"
        else:
            expected_model = "a model in which tokens meet in attention alone, at the positions that are given"
            reason = "in which convolutions, recurrences or attention of its own mix the tokens of one rank"
        got = f"{name}, {reason}: {why} in the order of {RANKS} ranks"
        raise ArgumentError("model", expected=expected_model, got=got, remedy=ONE_DEVICE)


def _token_ids(config: Any) -> Tensor:
    """Returns (1, 16) ids of tokens that are not special; all ids differ if the vocabulary is large enough."""
    config = config.get_text_config()
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            special |= {x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)}
    ids = [x for x in range(min(getattr(config, "vocab_size", TOKENS), 4 * TOKENS)) if x not in special] or [0]
    return torch.tensor([(ids * TOKENS)[:TOKENS]])


def _same_rows(got: Tensor, expected: Tensor, order: Tensor, dim: int) -> bool:
    """Returns whether `got` has the rows of `expected` in `order`, up to rounding."""
    if got.shape != expected.shape or got.shape[dim] != len(order):
        return False
    expected = expected.index_select(dim, order)
    dtypes = [x.dtype for x in (got, expected) if x.is_floating_point()]
    if torch.is_autocast_enabled(got.device.type):
        dtypes.append(torch.get_autocast_dtype(got.device.type))
    tolerance = max([1e-4, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])
    accurate = torch.float64 if got.dtype == torch.float64 else torch.float32
    a, b = (x.to(accurate).nan_to_num().movedim(dim, 0).flatten(1) for x in (got, expected))
    return bool(((a - b).norm(dim=1) <= tolerance * b.norm(dim=1)).all())


def _eager(modules: list[nn.Module]) -> AbstractContextManager[object]:
    """Returns a context manager that keeps compiled modules from compiling a graph for the check."""
    if any(is_compiled(module) for module in modules):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs forwards in evaluation mode, and restores everything that they change."""
    modules = list(model.modules())
    attributes = [{n: x for n, x in vars(m).items() if not n.startswith("_")} for m in modules]
    buffers = [
        {n: (x, x.detach().clone(), _version(x)) for n, x in buffers_of(m).items() if x is not None} for m in modules
    ]
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    cached = torch.is_autocast_cache_enabled()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _eager(modules):
            torch.set_autocast_cache_enabled(False)  # weights cast here would stay cached without gradients
            model.eval()
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, kept, tensors in zip(modules, attributes, buffers, strict=True):
            for name in [n for n in vars(module) if not n.startswith("_") and n not in kept]:
                del vars(module)[name]
            vars(module).update(kept)
            for name, (buffer, value, version) in tensors.items():
                buffers_of(module)[name] = buffer
                if _version(buffer) != version:  # an earlier forward's graph may hold an unchanged buffer
                    with torch.no_grad():
                        buffer.copy_(value)


def _version(x: Tensor) -> int:
    """Returns the number of in-place changes of `x`.

    It is 0 for an inference tensor, which counts no changes and cannot change outside of inference mode.
    """
    return 0 if x.is_inference() else version_of(x)
