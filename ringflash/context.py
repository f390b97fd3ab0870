"""ContextParallel: the ranks that share a sequence, how it is cut over them, and how they talk."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringflash import layout as layouts
from ringflash.errors import ArgumentError, PeerFailed, PeerLost, RankMismatch, RingTimeout
from ringflash.layout import LAYOUTS, Chunk, Layout, make_layout
from ringflash.masks import Mask, as_mask
from ringflash.plan import Plan, make_plan
from ringflash.transport.base import Transport
from ringflash.transport.connect import TRANSPORTS, Connection, connect, deadline_of
from ringflash.transport.control import ControlPlane, Field, is_alive, odd_ones

# Custom ops take no objects, so they look contexts up here by name, as torch does with process groups. A context is
# a value: the same group, layout and transport have the same name, so this stays as small as their number.
_CONTEXTS: dict[str, ContextParallel] = {}


class ContextParallel:
    """The ranks that share a sequence; pass it to `ring_attention`.

    Args:
        mesh_or_group: a one-dimensional DeviceMesh or a process group that this rank belongs to. Creating a context
            is a collective of its ranks.
        layout: how the sequence is cut: "zigzag" (equal causal work on every rank) or "contiguous".
        transport: how KV moves: "nccl" is point-to-point over the group's backend, NCCL or gloo; "symmetric" is pulled
            by the copy engines of GPUs that reach each other's memory; "auto" takes that where it can, and says why in
            `transport_reason`.
        timeout: how long a rank waits for another's message before it raises RingTimeout, in seconds or a timedelta;
            less than the group's own timeout. By default 5 minutes, or half the group's where that is less.
        debug: before each call, compare the plans that the ranks follow; a difference raises RankMismatch.

    Raises:
        ArgumentError: no process group, a group without this rank, a mesh of several dimensions, an unknown name, a
            transport that cannot join these ranks, a timeout that the group's would come before.
        RankMismatch: ranks ask for different transports or timeouts.
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | int | None,
        layout: str = "zigzag",
        transport: str = "auto",
        timeout: timedelta | float | None = None,
        debug: bool = False,
    ) -> None:
        group = _resolve_group(mesh_or_group)
        if transport not in TRANSPORTS:
            remedy = "Choose one of these; virtual ranks come from ContextParallel.local()."
            raise ArgumentError("transport", expected=f"one of {TRANSPORTS}", got=repr(transport), remedy=remedy)
        deadline = deadline_of(group, timeout)
        # A group keeps its connection: making one is a collective.
        asked = (transport, deadline)
        known = (context._connection for context in _CONTEXTS.values())
        connection = next((each for each in known if each is not None and each.serves(group, *asked)), None)
        connection = connection or connect(group, *asked)
        self._connection: Connection | None = connection
        self._control: ControlPlane | None = connection.control
        self.transport: Transport | None = connection.transport
        self.transport_kind, self.transport_reason = connection.kind, connection.reason
        self.group: dist.ProcessGroup | None = group
        kind = f"group {group.group_name} {transport} {deadline.total_seconds():g} s"
        self._set(dist.get_rank(group), dist.get_world_size(group), layout, kind, debug)
        self.local_ranks = (self.rank,)

    @classmethod
    def local(cls, world_size: int, layout: str = "zigzag") -> ContextParallel:
        """`world_size` virtual ranks in this process, to run and test ring schedules on one device.

        `shard` gives the shards of all ranks one after another, and `ring_attention` takes and returns that.
        """
        if world_size < 1:
            remedy = "Pass the number of virtual ranks."
            raise ArgumentError("world_size", expected="at least 1", got=world_size, remedy=remedy)
        self = cls.__new__(cls)
        self._connection = self._control = self.transport = self.group = None
        self.transport_kind, self.transport_reason = "local", "virtual ranks"
        self._set(0, world_size, layout, "local", debug=False)
        self.local_ranks = tuple(range(world_size))
        return self

    def _set(self, rank: int, world_size: int, layout: str, kind: str, debug: bool) -> None:
        if layout not in LAYOUTS:
            raise ArgumentError("layout", expected=f"one of {LAYOUTS}", got=repr(layout), remedy="Choose one of these.")
        self.rank, self.world_size, self.layout, self.debug = rank, world_size, layout, debug
        self.name = f"{kind} rank {rank} of {world_size} {layout}{' debug' if debug else ''}"
        _CONTEXTS[self.name] = self

    def __repr__(self) -> str:
        return f"ContextParallel({self.name}, over {self.transport_kind}: {self.transport_reason})"

    def _cut(self, seqlen: int) -> Layout:
        return make_layout(self.layout, seqlen, self.world_size)

    def _local_chunks(self, seqlen: int) -> list[Chunk]:
        chunks = self._cut(seqlen).chunks
        return [chunk for rank in self.local_ranks for chunk in chunks[rank]]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of the whole sequence `x`: a contiguous copy, rows in layout order along `dim`.

        Raises:
            ArgumentError: fewer rows than ranks.
        """
        return layouts.take(x, self._local_chunks(x.shape[dim]), dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence in order, from every rank's shard `x`; inverse of `shard`, exact, and a collective.

        Differentiable: a shard's gradient is its part of the sum of all ranks' gradients of the whole.

        Raises:
            RankMismatch: shards whose dtypes or other dimensions differ, or whose lengths are not the layout's.
        """
        if self._control is None:
            return layouts.put_together(x, self._local_chunks(x.shape[dim]), dim)
        dim %= x.ndim
        rest = [n for d, n in enumerate(x.shape) if d != dim]
        fields = {"operation": "unshard", "dim": dim, "shape": str(rest), "dtype": str(x.dtype)}
        seqlen = self._agreed_seqlen(fields, x.shape[dim])
        return _Unshard.apply(x, dim, self, self._control, seqlen)

    def positions(self, seqlen: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's rows of a sequence of `seqlen` tokens, in the order `shard` gives them."""
        return layouts.positions(self._local_chunks(seqlen), device)

    def plan(self, mask: Mask | None, seqlen: int, rank: int | None = None) -> Plan:
        """What `rank` (this one by default) does in a ring over `seqlen` tokens under `mask`; print it to read it."""
        return make_plan(self._cut(seqlen), as_mask(mask), self.rank if rank is None else rank)

    def agree(self, fields: Mapping[str, Field], local_seqlen: int) -> int:
        """Checks that all ranks make a call with the same `fields`, and returns the tokens in the whole sequence.

        Raises:
            RankMismatch: on every rank, before any data moves, naming the field and the ranks.
            PeerFailed: when another rank raised instead of calling.
        """
        return local_seqlen if self._control is None else self._agreed_seqlen(fields, local_seqlen)

    def announce_failure(self, error: Exception) -> None:
        """Makes the other ranks' current call raise PeerFailed, because this rank's raised `error`."""
        if self._control is not None:
            self._control.fail(error)

    def check_device(self, device: torch.device) -> None:
        """Raises ArgumentError unless the context moves tensors on `device`."""
        connection = self._connection
        if connection is None:
            return
        if device.type in connection.devices and connection.device in (None, device):
            return
        raise ArgumentError(
            "q",
            expected=f"a tensor on {connection.device or ' or '.join(connection.devices)}, as the context",
            got=device,
            remedy="Move q, k and v, or make the context of a group for their device: gloo for CPUs, NCCL for GPUs.",
            rank=self.rank,
        )

    @contextmanager
    def in_ring(self, plan: Plan) -> Iterator[None]:
        """Around a pass of `plan`: what this rank raises in it makes the other ranks raise PeerFailed, soon.

        Raises:
            PeerFailed: another rank raised in it.
            PeerLost: another rank's process is gone.
            RingTimeout: another rank did not do its part in time.
            RankMismatch: in debug mode, when ranks follow different plans.
        """
        if self._control is None:
            yield
            return
        faults = self._control.faults
        faults.plan = plan
        if self.debug:
            everyone = [make_plan(plan.layout, plan.mask, rank) for rank in range(self.world_size)]
            everyone[plan.rank] = plan
            self._control.compare("plan", repr([(each.rank, each.hops) for each in everyone]), str(plan))
        try:
            yield
        except (PeerFailed, PeerLost, RingTimeout):
            raise
        except BaseException as error:
            faults.raised(error)
            raise

    def _agreed_seqlen(self, fields: Mapping[str, Field], local_seqlen: int) -> int:
        assert self._control is not None
        lengths = self._control.agree(
            {**fields, "layout": self.layout, "debug": self.debug, "seqlen": local_seqlen}, free="seqlen"
        )
        expected = self._cut(sum(lengths)).lengths
        if tuple(lengths) != expected:
            values = [f"{got} rows, the layout gives {want}" for got, want in zip(lengths, expected, strict=True)]
            raise RankMismatch("seqlen", values, odd_ones(lengths), rank=self.rank)
        return sum(lengths)


class _Unshard(torch.autograd.Function):
    """Gathers shards; backward sums the ranks' gradients and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, context: ContextParallel, control: ControlPlane, seqlen: int) -> Tensor:
        ctx.dim, ctx.context, ctx.control = dim, context, control
        cut = make_layout(context.layout, seqlen, context.world_size)
        rows = control.gather(x, list(cut.lengths), dim)
        return layouts.put_together(rows, [chunk for chunks in cut.chunks for chunk in chunks], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.context.shard(ctx.control.sum(grads[0]), ctx.dim), None, None, None, None


def _resolve_group(mesh_or_group: object) -> dist.ProcessGroup:
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            names = mesh_or_group.mesh_dim_names
            remedy = 'Pass one dimension of it, as in mesh["context_parallel"].'
            raise ArgumentError("mesh", expected="one dimension", got=f"dimensions {names}", remedy=remedy)
        if mesh_or_group.get_coordinate() is None:
            raise ArgumentError(
                "mesh",
                expected="a mesh that this rank belongs to",
                got=f"ranks {mesh_or_group.mesh.tolist()}",
                remedy="Create the context only on ranks of the mesh.",
                rank=dist.get_rank(),
            )
        return mesh_or_group.get_group()
    if not isinstance(mesh_or_group, dist.ProcessGroup):
        excluded = mesh_or_group == dist.GroupMember.NON_GROUP_MEMBER
        raise ArgumentError(
            "mesh_or_group",
            expected="a DeviceMesh or a process group that this rank belongs to",
            got="a group without this rank" if excluded else repr(mesh_or_group),
            remedy="Create the context only on ranks of the group; dist.group.WORLD has all; without torch.distributed "
            "use flash_attention, or ContextParallel.local(n) for n virtual ranks.",
            rank=dist.get_rank() if dist.is_initialized() else None,
        )
    if not is_alive(mesh_or_group):
        raise ArgumentError(
            "mesh_or_group",
            expected="a process group that exists",
            got="one that was destroyed",
            remedy="Create the context after the group, and anew when the group is.",
        )
    if dist.get_rank(mesh_or_group) < 0:
        raise ArgumentError(
            "mesh_or_group",
            expected="a group that this rank belongs to",
            got=f"a group of ranks {dist.get_process_group_ranks(mesh_or_group)}",
            remedy="Create the context only on ranks of the group.",
            rank=dist.get_rank(),
        )
    return mesh_or_group


def context_by_name(name: str) -> ContextParallel:
    """The context with this `.name`."""
    return _CONTEXTS[name]


def described(mask: Mask) -> str:
    """A mask in words that differ when any of its values does."""
    words, tensors = mask.spec
    digest = zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return f"{mask!r} (checksum {digest:08x})" if tensors else words or "full"
