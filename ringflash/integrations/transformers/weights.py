"""Match of a transformers model's tensors with those that a folder stores, by transformers' own tables of names.

transformers renames tensors between files and modules, and converts some: it stacks experts, and splits projections
that were stored as one. Its tables and their functions are public. The private names are attributes of its models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """Stored tensors that make one or several tensors of a model.

    Args:
        shapes: name and shape of each tensor of the model.
        stored: names of the stored tensors by the converter's pattern; a single name without a converter.
        converter: transformers' conversion; None where the stored tensor is the model's.
    """

    shapes: Shapes
    stored: Mapping[str, list[str]]
    converter: Any = None

    @property
    def name(self) -> str:
        """First name of a stored tensor."""
        return next(iter(self.stored.values()))[0]

    @property
    def is_stack(self) -> bool:
        """Whether row i of the model's one tensor depends on the i-th stored tensor of each pattern alone."""
        if self.converter is None or len(self.shapes) > 1:
            return False
        from transformers.core_model_loading import Concatenate, MergeModulelist

        (shape,) = self.shapes.values()
        merge, *others = self.converter.operations
        is_merged = type(merge) is MergeModulelist and merge.dim == 0
        is_kept = all(type(x) is Concatenate and x.dim > 0 for x in others)
        return is_merged and is_kept and all(len(names) == shape[0] for names in self.stored.values())

    def convert(self, read: Callable[[str], Tensor], model: Any, rows: slice | None = None) -> dict[str, Tensor]:
        """Returns the model's tensors by name.

        Args:
            read: returns the whole stored tensor of a name.
            model: the model, with or without storage.
            rows: rows of the one tensor to make, of a source that `is_stack`; None makes whole tensors.
        """
        converter, target = deepcopy(self.converter), next(iter(self.shapes))
        for pattern, names in self.stored.items():
            for name in names if rows is None else names[rows]:
                converter.add_tensor(target, name, pattern, partial(read, name))
        made = converter.convert(target, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


@dataclass(frozen=True)
class Match:
    """Places of stored tensors in a model.

    Args:
        sources: the stored tensors that have a place.
        missing: names of the model's tensors that are not stored, except those that another name shares.
        drawn: such names that the model expects not to be stored.
        unexpected: stored names without a place, except those that the model expects to be without one.
    """

    sources: list[Source]
    missing: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def match_weights(model: Any, stored: Shapes) -> Match:
    """Matches the tensors of a transformers model, with or without storage, with the `stored` names and shapes.

    The model keeps the conversions that were used: its `save_pretrained` reverts them, as after `from_pretrained`.

    Raises:
        Exception: transformers has other tables than its releases that this function was written for, or a conversion
            needs the stored values.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renames = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    plain: dict[str, str] = {}
    converted: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected: dict[str, str] = {}  # stored name by the name that transformers gives it
    for name in sorted(stored, key=dot_natural_key):  # some renames depend on the order
        target, pattern = rename_source_key(name, renames, converters, prefix, tensors)
        if target not in tensors and name in tensors:
            target, pattern = rename_source_key(name, [], [], prefix, tensors)
        if target not in tensors:
            unexpected[target] = name
        elif pattern is None:
            plain.setdefault(target, name)
        else:
            converted.setdefault(target, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(name)
    sources = [Source({target: stored[name]}, {"": [name]}) for target, name in plain.items()]
    for target, (converter, names) in converted.items():
        _check_operations(converter)
        made = Source({target: ()}, names, converter).convert(lambda n: torch.empty(stored[n], device="meta"), model)
        sources.append(Source({name: tuple(x.shape) for name, x in made.items()}, names, converter))
    model._weight_conversions = [x for x in mapping if x.was_used()]
    return _compared(model, sources, unexpected)


def _check_operations(converter: Any) -> None:
    """Raises ValueError for conversions that may compute: transformers computes in the dtype of the parameter."""
    for operation in converter.operations:
        if type(operation).__module__ != "transformers.core_model_loading":
            raise ValueError(f"{type(operation).__name__} may change values")


def _compared(model: Any, sources: list[Source], unexpected: dict[str, str]) -> Match:
    """Returns the match, without what the model expects to be missing or without a place."""
    found = {name for source in sources for name in source.shapes}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    lost = [shared[0] for shared in names.values() if found.isdisjoint(shared)]
    buffers = [name for name, _ in model.named_buffers()]
    without_place = set(model._keys_to_ignore_on_load_unexpected or ())
    # transformers' from_pretrained knows these two of old folders, beside the model's own.
    without_place |= {r"rotary_emb\.inv_freq"} if any(x.endswith("rotary_emb.inv_freq") for x in buffers) else set()
    without_place |= {r"(^|\.)position_ids$"} if any(x.endswith("position_ids") for x in buffers) else set()
    is_drawn, has_no_place = _any_of(model._keys_to_ignore_on_load_missing or ()), _any_of(without_place)
    return Match(
        sources,
        missing=[name for name in lost if not is_drawn(name)],
        drawn=[name for name in lost if is_drawn(name)],
        unexpected=[name for target, name in unexpected.items() if not has_no_place(target)],
    )


def _any_of(patterns: Any) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)
