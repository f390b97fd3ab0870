"""ContextParallel: the ranks that share a sequence, the cut of the sequence over them, and their connections."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ringflash.checks import check_whole
from ringflash.coordination.failures import Faults
from ringflash.coordination.first_tokens import FirstTokens
from ringflash.coordination.one_process import OneProcess
from ringflash.coordination.registry import Closed, Registry
from ringflash.coordination.session import ControlPlane, Field, outlier_ranks
from ringflash.errors import FIRST_TOKENS, ArgumentError, RankMismatch
from ringflash.groups import group_of
from ringflash.layouts import layout as layouts
from ringflash.layouts.grid import HEADS, RING, Grid, check_schedule, split_rows
from ringflash.layouts.layout import LAYOUTS, Chunk, Layout, make_layout
from ringflash.masks import Mask, as_mask, described
from ringflash.recent_calls import RecentCalls
from ringflash.ring.cuda_graphs import GraphCache
from ringflash.ring.gathered_plan import make_grouped_plan, receives_at_most
from ringflash.ring.plan import Plan
from ringflash.ring.ring_plan import make_plan
from ringflash.token_mean import TokenMeans
from ringflash.transport.all_to_all import HeadsTransport
from ringflash.transport.base import Transport
from ringflash.transport.connect import (
    TRANSPORTS,
    Connection,
    ConnectRequest,
    MeshConnection,
    connect,
    connect_mesh,
    deadline_of,
)

T = TypeVar("T")

GRAPHS = (True, False, "auto")
# "auto" groups hops if no rank receives more KV than this: 8192 tokens of 8 heads of 128 in two bytes over four ranks.
# To receive more takes longer than the launches of a ring; see docs/transports.md. A rank that receives at most its own
# KV, as under a window, has enough work for twice as much.
GROUPED_BYTES = 24 * 2**20

_CONTEXTS = Registry()
context_by_name = _CONTEXTS.by_name
"""Returns the context with this `.name`."""
other_cut = _CONTEXTS.other_cut


class ContextParallel(OneProcess, TokenMeans):
    """The ranks that share a sequence; pass it to `ring_attention`.

    Args:
        mesh_or_group: a process group that this rank belongs to, or a DeviceMesh of one dimension, or of two named
            "ring" and "heads". KV goes around the first, heads are split over the second, and the sequence is cut over
            the ranks of both. Creating a context is a collective of its ranks.
        layout: the cut of the sequence: "zigzag" (equal causal work on every rank), "contiguous", "striped", or
            "balanced", which follows the mask: see `make_layout`.
        transport: "nccl" sends KV point-to-point over the group's backend, NCCL or gloo. "symmetric" pulls KV with the
            copy engines of GPUs that reach each other's memory. "auto" chooses symmetric if possible, and gives its
            reason in `transport_reason`.
        timeout: how long a rank waits for a message before it raises RingTimeout, in seconds or a timedelta; less than
            the group's own timeout. By default 5 minutes, or half the group's timeout if that is less.
        debug: before each call, compare the plans that the ranks follow; a difference raises RankMismatch.
        fixed_lengths: whether calls with the same shapes on this rank always have sequences of one length, as in
            training at one context length. Between GPUs a call that was agreed on before then continues without waiting
            for the other ranks, and a difference is found one call late.
        inner_ring: number of neighbouring ranks joined by fast links. KV goes around these ranks while the next KV
            crosses slow links. None is one ring.
        hops: "ring" computes with the KV of one rank after another, while the next KV is on its way. "grouped" sends
            all KV directly, in one exchange and one launch: for windows, and for sequences so short that launches take
            longer than their work. "auto" groups hops on GPUs if no rank receives more than 24 MiB of KV, or no more
            than its own KV up to 48 MiB. It groups none with an inner ring, or with `cuda_graphs=True`, which removes
            launches.
        cuda_graphs: whether passes over the symmetric transport are captured and then replayed, with the same bits. For
            sequences so short that launches take longer than their work. True captures every pass after its second call
            with the same shapes. "auto" captures passes after a hundred calls if a rank owns at most 16 MiB of KV,
            unless heads are split or `debug` is set. Each graph keeps its outputs; all graphs share memory for inputs
            and intermediate results. Calls with dropout, or with a mask that holds lengths or blocks, are not captured.

    Raises:
        ArgumentError: no process group, or one without this rank; a mesh of other dimensions; an unknown name; a
            transport that cannot join these ranks; a timeout that is not below the group's timeout; an inner ring that
            does not divide the ring, or has grouped hops; or graphs without the symmetric transport.
        RankMismatch: ranks ask for different transports or timeouts.
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | dist.ProcessGroup | int | None,
        layout: str = "zigzag",
        transport: str = "auto",
        timeout: timedelta | float | None = None,
        debug: bool = False,
        *,
        fixed_lengths: bool = False,
        inner_ring: int | None = None,
        hops: str = "auto",
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        if transport not in TRANSPORTS:
            remedy = "Choose one of these; virtual ranks come from ContextParallel.local()."
            raise ArgumentError("transport", expected=f"one of {TRANSPORTS}", got=repr(transport), remedy=remedy)
        if cuda_graphs not in GRAPHS:
            remedy = "Leave it out, or choose one of these."
            raise ArgumentError("cuda_graphs", expected=f"one of {GRAPHS}", got=repr(cuda_graphs), remedy=remedy)
        group, mesh, grid = group_of(mesh_or_group)
        check_schedule(hops, inner_ring, grid.ring)
        deadline = deadline_of(group, timeout)
        request = ConnectRequest(group, transport, deadline, inner_ring is not None, fixed_lengths)
        known = (each for each in _CONTEXTS.connections(Connection) if each.serves(request))
        connection = _CONTEXTS.shared(next(known, None), [group]) or connect(request)
        both = None
        if mesh is not None:
            heads = mesh.get_group(HEADS)
            meshes = (each for each in _CONTEXTS.connections(MeshConnection) if each.serves(heads, connection))
            both = _CONTEXTS.shared(next(meshes, None), [heads, group])
            both = both or connect_mesh(mesh, (RING, HEADS), grid.places, connection)
        self._connection: Connection | None = connection
        self._mesh_connection: MeshConnection | None = both
        asked = cuda_graphs != "auto" and bool(cuda_graphs)
        if asked and connection.kind != "symmetric":
            remedy = "Leave it out: CPUs have no launches to save, and rings over NCCL do not end in a graph."
            raise ArgumentError("cuda_graphs", expected="the symmetric transport", got=connection.kind, remedy=remedy)
        can_capture = connection.kind == "symmetric" and grid.ring > 1 and grid.heads == 1 and not debug
        captures = asked or (cuda_graphs == "auto" and can_capture)
        self.graphs = GraphCache(asked=asked) if captures else None
        self._control: ControlPlane | None = connection.control if both is None else both.control
        self.transport: Transport | None = connection.transport
        self.heads_transport: HeadsTransport | None = None if both is None else both.transport
        self.transport_kind, self.transport_reason = connection.kind, connection.reason
        self.group: dist.ProcessGroup | None = group
        self.heads_group: dist.ProcessGroup | None = None if both is None else both.heads
        place = dist.get_rank(group), 0 if both is None else dist.get_rank(both.heads)
        names = group.group_name if both is None else f"{group.group_name} and {both.heads.group_name}"
        kind = f"group {names} {transport} {deadline.total_seconds():g} s{' fixed lengths' if fixed_lengths else ''}"
        kind += {True: " graphs", False: " no graphs", "auto": ""}[cuda_graphs]
        if hops == "auto" and asked:
            hops = "ring"
        ranks = dist.get_process_group_ranks(group) if mesh is None else mesh.mesh.flatten().tolist()
        self.ranks = tuple(sorted(ranks))
        self._set(grid.places.index(place), grid, inner_ring, hops, layout, kind, debug)
        self.local_ranks = (self.rank,)

    @classmethod
    def local(
        cls,
        world_size: int,
        layout: str = "zigzag",
        *,
        heads: int = 1,
        inner_ring: int | None = None,
        hops: str = "auto",
    ) -> ContextParallel:
        """Returns a context of `world_size` virtual ranks in this process, to run ring schedules on one device.

        Groups of `heads` consecutive ranks split heads, and the ring has `world_size / heads` ranks. `inner_ring` and
        `hops` act as in a context of processes. `shard` returns the shards of all ranks one after another, and
        `ring_attention` takes and returns tensors of that form.
        """
        check_whole("world_size", world_size, 1, "Pass the number of virtual ranks.")
        self = cls.__new__(cls)
        self._connection = self._mesh_connection = self._control = self.transport = self.heads_transport = None
        self.group = self.heads_group = self.graphs = None
        self.transport_kind, self.transport_reason = "local", "virtual ranks"
        grid = Grid.of(world_size, heads)
        check_schedule(hops, inner_ring, grid.ring)
        self.ranks = ()
        self._set(0, grid, inner_ring, hops, layout, "local", debug=False)
        self.local_ranks = tuple(range(world_size))
        return self

    def _set(
        self, rank: int, grid: Grid, inner_ring: int | None, hops: str, layout: str, kind: str, debug: bool
    ) -> None:
        if layout not in LAYOUTS:
            raise ArgumentError("layout", expected=f"one of {LAYOUTS}", got=repr(layout), remedy="Choose one of these.")
        if hops == "auto" and inner_ring is not None:
            hops = "ring"
        self.rank, self.grid, self.inner_ring, self.hops, self.layout = rank, grid, inner_ring, hops, layout
        self.debug = debug
        self.world_size = len(grid.places)
        self.own_passes = 0  # forwards and backwards of attention so far
        self.cut_rows = 0  # rows of the shard that was cut last
        self.has_warned_of_order = False  # of dimensions
        self.has_compared_cuts = self.is_virtual  # with other contexts
        self._first_tokens = FirstTokens(compares=self._control is not None and self.world_size > 1)
        self.prepared_calls: RecentCalls[Any] = RecentCalls()  # of `ring_attention`
        self.operator_calls: RecentCalls[Any] = RecentCalls()  # of its operators
        # The layout and the other choices of the schedule, as text.
        in_words = "" if inner_ring is None else f"inner ring {inner_ring}", "" if hops == "auto" else f"hops {hops}"
        self._schedule = " ".join(filter(None, (layout, str(grid), *in_words)))
        self.name = f"{kind} rank {rank} of {self.world_size} {self._schedule}{' debug' if debug else ''}"
        self._left = _CONTEXTS.add(self, [each for each in (self._connection, self._mesh_connection) if each])
        _CONTEXTS.close_unused()

    def close(self) -> None:
        """Closes the connections of this context, unless another context uses them; later calls raise ArgumentError.

        All ranks close the context after its last call or backward, or leave its `with` block. A second close does
        nothing. A context without references is closed when the next one is made.
        """
        self.prepared_calls, self.operator_calls = RecentCalls(), RecentCalls()
        self._control = cast("ControlPlane", Closed(self.rank))
        self._connection = self._mesh_connection = self.transport = self.heads_transport = self.graphs = None
        self._left()
        _CONTEXTS.close_unused()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ContextParallel({self.name}, over {self.transport_kind}: {self.transport_reason})"

    def _cut(self, seqlen: int, mask: Mask | None) -> Layout:
        return split_rows(self._ring_cut(seqlen, mask), self.grid)

    def _ring_cut(self, seqlen: int, mask: Mask | None) -> Layout:
        return make_layout(self.layout, seqlen, self.grid.ring, None if mask is None else as_mask(mask))

    def _local_chunks(self, seqlen: int, mask: Mask | None) -> list[Chunk]:
        chunks = self._cut(seqlen, mask).chunks
        return [chunk for rank in self.local_ranks for chunk in chunks[rank]]

    def shard(self, x: Tensor, dim: int = 1, *, mask: Mask | None = None) -> Tensor:
        """Returns this rank's part of the whole sequence `x`: a contiguous copy, rows in layout order along `dim`.

        Args:
            x: the whole sequence, the same on every rank. The next call of attention compares checksums of the first
                token ids, int32 or int64 (batch, seqlen). If they differ, that call and all later ones raise
                RankMismatch on every rank.
            dim: the dimension that is cut.
            mask: the mask of the attention to come; only the layout "balanced" depends on it.

        Raises:
            ArgumentError: no such dimension, fewer rows than ranks, no mask for "balanced" or one that does not fit.
        """
        dim = layouts.checked_dim(x, dim)
        self._first_tokens.note(x, dim)
        shard = layouts.take(x, self._local_chunks(x.shape[dim], mask), dim)
        self.cut_rows = shard.shape[dim]
        return shard

    def unshard(self, x: Tensor, dim: int = 1, *, mask: Mask | None = None) -> Tensor:
        """Returns the whole sequence in order from every rank's shard `x`: the exact inverse of `shard`; a collective.

        It is differentiable once: a shard's gradient is its part of the sum of all ranks' gradients of the whole. Pass
        the same `mask` as to `shard`.

        Raises:
            ArgumentError: as `shard`.
            RankMismatch: shards differ in dtype or in another dimension, or their lengths do not fit the layout.
            PeerFailed: another rank raised for its arguments.
            RingTimeout: another rank did not come to the call or to its backward in time.
        """
        try:
            dim = layouts.checked_dim(x, dim)
            if self._control is None:
                return layouts.put_together(x, self._local_chunks(x.shape[dim], mask), dim)
            rest = [n for d, n in enumerate(x.shape) if d != dim]
            fields = {"operation": "unshard", "dim": dim, "shape": str(rest), "dtype": str(x.dtype)}
            if self.layout == "balanced":
                fields["mask"] = described(as_mask(mask))
        except Exception as error:
            self.announce_failure(error)
            raise
        seqlen = self.agree(fields, x.shape[dim], mask)
        return _Unshard.apply(x, dim, self, self._control, seqlen, mask)

    def positions(self, seqlen: int, device: torch.device | str | None = None, *, mask: Mask | None = None) -> Tensor:
        """Returns the global positions of this rank's rows of a sequence of `seqlen` tokens, in the order of `shard`.

        Raises:
            ArgumentError: no whole number of tokens; or as `shard`.
        """
        check_whole("seqlen", seqlen, 1, "Pass the number of tokens in the whole sequence.")
        return layouts.positions(self._local_chunks(seqlen, mask), device)

    def plan(self, mask: Mask | None, seqlen: int, rank: int | None = None, *, row_bytes: int | None = None) -> Plan:
        """Returns the plan of `rank` for a ring over `seqlen` tokens under `mask`; print the plan to read it.

        With heads split over ranks the plan covers the ring alone, with ring indices as ranks and rows of whole groups.

        Args:
            mask: as in `ring_attention`.
            seqlen: number of tokens in the whole sequence.
            rank: a rank of the context; this rank by default.
            row_bytes: bytes of a token's keys and values on a GPU: batch * (its KV heads) * (headdim + headdim_v) *
                itemsize. With hops="auto" they decide on grouping; without them the plan is a ring.

        Raises:
            ArgumentError: no whole number of tokens or bytes, no such rank, a mask of another sequence; or as
                `make_layout`.
        """
        check_whole("seqlen", seqlen, 1, "Pass the number of tokens in the whole sequence.")
        if row_bytes is not None:
            check_whole("row_bytes", row_bytes, 1, "Pass the bytes of a token's keys and values, or leave it out.")
        rank = self.rank if rank is None else rank
        if not isinstance(rank, int) or rank not in range(self.world_size):
            expected = f"one of the {self.world_size} ranks, counted from 0"
            raise ArgumentError("rank", expected=expected, got=repr(rank), remedy="Leave it out for this rank's plan.")
        mask = as_mask(mask)
        mask.validate(seqlen)
        place, _ = self.grid.places[rank]
        layout = self._ring_cut(seqlen, mask)
        return self._plan_at(place, layout, mask, self._groups(layout, mask, row_bytes))

    def _plan_at(self, place: int, layout: Layout, mask: Mask, groups: bool) -> Plan:
        if groups:
            return make_grouped_plan(layout, mask, place)
        return make_plan(layout, mask, place, self.inner_ring)

    def _groups(self, layout: Layout, mask: Mask, row_bytes: int | None) -> bool:
        """Returns whether hops are grouped; this depends only on values that ranks have agreed on."""
        if self.hops != "auto" or row_bytes is None:
            return self.hops == "grouped"
        own_bytes = layout.least_length * row_bytes
        most = max(GROUPED_BYTES, min(own_bytes, 2 * GROUPED_BYTES))
        return receives_at_most(layout, mask, most // row_bytes)

    @property
    def passes(self) -> int:
        """Forwards and backwards of attention so far, of all contexts of these ranks that live here."""
        return _CONTEXTS.passes(self.ranks)

    @property
    def is_virtual(self) -> bool:
        """Returns whether all ranks are in this process, so that calls need no agreement."""
        return self._control is None

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return isinstance(self._control, Closed)

    def check_heads(self, nheads: int) -> None:
        """Raises ArgumentError unless `nheads` query heads can be split evenly over the ranks of a group."""
        if nheads % self.grid.heads:
            expected = f"a multiple of the {self.grid.heads} ranks that heads are split over"
            remedy = "Split them over fewer ranks, and pass KV around more."
            raise ArgumentError("nheads", expected=expected, got=nheads, remedy=remedy)

    def agree(self, fields: Mapping[str, Field], local_seqlen: int, mask: Mask | None) -> int:
        """Checks that all ranks make a call with the same `fields`; returns the number of tokens in the whole sequence.

        `mask` is the mask of the call, which `fields` describes.

        Raises:
            RankMismatch: ranks differ; raised on every rank before any data moves, and names the field and the ranks.
            PeerFailed: another rank raised instead of calling.
        """
        kind = *fields, *fields.values(), mask
        return self.agree_on(kind, lambda: fields, local_seqlen, mask, lambda seqlen: seqlen)

    def agree_on(
        self,
        kind: Hashable,
        fields: Callable[[], Mapping[str, Field]],
        local_seqlen: int,
        mask: Mask | None,
        then: Callable[[int], T],
    ) -> T:
        """Returns `then(seqlen)` with the result of `agree`, cached for calls of the same `kind`.

        `fields` and `then` depend on `kind` alone; a known kind calls neither, but for one more `then` if `optimistic`.
        Virtual ranks need no agreement and cache nothing.
        """
        if self._control is None:
            return then(local_seqlen)

        first = self._first_tokens if self._first_tokens.pending is not None else None

        def described() -> Mapping[str, Field]:
            own = {"layout": self._schedule, "debug": self.debug, "seqlen": local_seqlen}
            return {**fields(), **own, FIRST_TOKENS: None if first is None else first.field()}

        def concluded(lengths: list[int]) -> T:
            expected = self._cut(sum(lengths), mask).lengths
            if tuple(lengths) != expected:
                values = [f"{got} rows, the layout gives {want}" for got, want in zip(lengths, expected, strict=True)]
                raise RankMismatch("seqlen", values, outlier_ranks(lengths), rank=self.rank)
            return then(sum(lengths))

        kind = self.name, local_seqlen, kind, first  # `first` itself, as contexts of one name share the cache
        result = self._control.agree_on(kind, described, free="seqlen", then=concluded)
        if first is not None:
            first.pending = None
        return result

    def largest(self, name: str, value: int) -> int:
        """Returns the largest `value` of all ranks; a collective. `name` is the same on all ranks.

        Raises:
            PeerFailed: another rank raised instead of calling.
        """
        if self._control is None:
            return value
        return max(self._control.agree_now({"operation": "largest", "of": name, "value": value}, free="value"))

    def forget_lengths(self) -> None:
        """Makes the next call of each kind wait for the agreement of all ranks; other ranks need not do the same.

        With `fixed_lengths`, call it before sequences of another length that have the same shapes as earlier calls.
        """
        if self._control is not None:
            self._control.forget()

    def announce_failure(self, error: Exception) -> None:
        """Makes the other ranks' current call raise PeerFailed, because this rank's raised `error`."""
        if self._control is not None:
            self._control.fail(error)

    def check_alive(self) -> None:
        """Raises ArgumentError for a context that was closed, or whose group was destroyed."""
        if self._control is not None:
            self._control.check_alive()

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

    @property
    def faults(self) -> Faults | None:
        """Returns the failure state of this rank's ring; None for virtual ranks."""
        return None if self._connection is None else self._connection.control.faults

    def begin_pass(self, plan: Plan) -> Faults | None:
        """Stores the plan that this rank follows from now on in `faults`, and returns `faults`.

        Raises:
            RankMismatch: in debug mode, ranks follow different plans.
        """
        faults = self.faults
        if faults is None or self._control is None:
            return None
        faults.plan = plan
        if self.debug:
            places = range(plan.world_size)
            everyone = [self._plan_at(place, plan.layout, plan.mask, plan.grouped) for place in places]
            everyone[plan.rank] = plan
            self._control.compare("plan", repr([(each.rank, each.steps) for each in everyone]), str(plan))
        return faults

    def watch(self, plan: Plan, stream: torch.cuda.Stream) -> None:
        """Watches a replayed pass of `plan`, queued on `stream`, as one message of hop 0; a peer's failure ends it."""
        assert self._connection is not None
        done = torch.cuda.Event()
        done.record(stream)
        if self._connection.watch is not None:
            self._connection.watch.add(done.query, 0, [rank for rank in range(plan.world_size) if rank != plan.rank])
        if self._mesh_connection is not None and self._mesh_connection.watch is not None:
            self._mesh_connection.watch.add(done.query, 0, [])  # the pass also waits for the ranks that share heads


class _Unshard(torch.autograd.Function):
    """Gathers shards; the backward sums the ranks' gradients and takes this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, context: ContextParallel, control: ControlPlane, seqlen: int, mask: Mask | None
    ) -> Tensor:
        ctx.dim, ctx.context, ctx.control, ctx.mask = dim, context, control, mask
        cut = context._cut(seqlen, mask)
        rows = control.gather(x, list(cut.lengths), dim)
        return layouts.put_together(rows, [chunk for chunks in cut.chunks for chunk in chunks], dim)

    @staticmethod
    @once_differentiable  # autograd does not see the sum over ranks, so a second derivative would lack their shares
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        context, dim = ctx.context, ctx.dim
        kind = {"operation": "unshard backward", "dim": dim, "shape": str(grad.shape), "dtype": str(grad.dtype)}
        # The sum would wait for a missing rank until the group's timeout, and would not name the rank.
        context._control.agree_now({**kind, "rank": context.rank}, free="rank")
        return context.shard(ctx.control.sum(grad), dim, mask=ctx.mask), None, None, None, None, None
