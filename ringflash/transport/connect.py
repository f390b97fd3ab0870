"""Connection of the ranks of a process group into a ring: its own groups, its deadline, and a suitable transport."""

from __future__ import annotations

import atexit
import gc
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
from torch.distributed.device_mesh import DeviceMesh

from ringflash.coordination import processes
from ringflash.coordination.failures import Faults
from ringflash.coordination.mesh import MeshControlPlane
from ringflash.coordination.session import ControlPlane, is_alive
from ringflash.coordination.watch import Watch
from ringflash.errors import ArgumentError
from ringflash.torch_private import timeouts_of
from ringflash.transport import gloo, groups, nccl
from ringflash.transport.all_to_all import HeadsTransport, ProcessGroupHeads
from ringflash.transport.base import Transport, TwoLinks
from ringflash.transport.gloo import GlooTransport
from ringflash.transport.groups import backend_of, new_group
from ringflash.transport.nccl import NcclTransport

# Frees finished works in reference cycles. Otherwise gloo frees them with the interpreter, and sometimes aborts. Hooks
# run last-in first, so this one, registered at import, follows the hook with which training leaves its group.
atexit.register(gc.collect)

TRANSPORTS = ("auto", "nccl", "symmetric")
DEADLINE = timedelta(minutes=5)


@dataclass(frozen=True)
class ConnectRequest:
    """Properties of a ring that a caller asks for.

    Args:
        group: the ranks.
        transport: one of `TRANSPORTS`.
        deadline: longest time that a rank waits for another rank.
        double: True for a ring of rings, which sends messages over two kinds of links.
        optimistic: see `ControlPlane`; ignored between CPUs, where every call waits, as its messages do.
    """

    group: dist.ProcessGroup
    transport: str
    deadline: timedelta
    double: bool
    optimistic: bool


@dataclass(frozen=True, eq=False)
class Connection:
    """Connection between the ranks of one group.

    Args:
        asked: the request that this connection serves.
        control: agrees on calls.
        transport: moves keys, values and their gradients.
        kind: "nccl", "gloo" or "symmetric".
        reason: reason for this kind.
        devices: device types of the tensors that the transport moves.
        device: the GPU of this rank; None for CPUs.
        watch: ends the ring if messages that GPUs wait for do not arrive; None if no GPU waits.
    """

    asked: ConnectRequest
    control: ControlPlane
    transport: Transport
    kind: str
    reason: str
    devices: tuple[str, ...]
    device: torch.device | None
    watch: Watch | None = None

    def serves(self, asked: ConnectRequest) -> bool:
        """Returns whether this connection joins exactly the requested group, as requested, and has not broken."""
        return self.asked == asked and self.control.faults.is_whole

    @property
    def number(self) -> int:
        """Returns a number that identifies this connection, the same on all ranks."""
        return self.control.faults.number

    @property
    def is_dead(self) -> bool:
        """Returns whether the ring has broken, or its group was destroyed."""
        return self.control.faults.error is not None or not is_alive(self.asked.group)

    def close(self) -> None:
        """Frees descriptors, threads and memory of this rank alone, after its GPU has finished the queued work."""
        if self.device is not None and self.control.faults.error is None:
            torch.cuda.synchronize(self.device)
        self.control.faults.close()


@dataclass(frozen=True, eq=False)
class MeshConnection:
    """Connection between the ranks of a two-dimensional mesh, in addition to the connection of its ring.

    Args:
        ring: connection of the first dimension.
        heads: group of the second dimension.
        control: agrees on calls, over the ranks of both dimensions.
        transport: exchanges heads for rows.
        watch: ends the ring if an exchange between GPUs is late; None on CPUs.
    """

    ring: Connection
    heads: dist.ProcessGroup
    control: MeshControlPlane
    transport: HeadsTransport
    watch: Watch | None

    def serves(self, heads: dist.ProcessGroup, ring: Connection) -> bool:
        """Returns whether this connection is for exactly this group and this ring, and has not broken."""
        return self.heads is heads and self.ring is ring and self.control.faults.is_whole

    @property
    def number(self) -> int:
        """Returns a number that identifies this connection, the same on all ranks."""
        return self.control.faults.number

    @property
    def is_dead(self) -> bool:
        """Returns whether this connection or its ring has broken, or a group was destroyed."""
        return self.control.faults.error is not None or self.ring.is_dead or not is_alive(self.heads)

    def close(self) -> None:
        """Frees descriptors, threads and memory, as `Connection.close` does."""
        if self.ring.device is not None and self.control.faults.error is None:
            torch.cuda.synchronize(self.ring.device)
        self.control.faults.close()


def connect(asked: ConnectRequest) -> Connection:
    """Connects the ranks of `asked.group` into a ring; a collective of these ranks.

    Raises:
        ArgumentError: `transport` cannot connect these ranks.
        RankMismatch: ranks ask for rings with different properties.
    """
    group, transport, double = asked.group, asked.transport, asked.double
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        remedy = "Make the group with sort_ranks=True, the default."
        raise ArgumentError("mesh_or_group", expected="ranks in ascending order", got=ranks, remedy=remedy)
    on_nccl = backend_of(group, "cuda") == "nccl" and torch.cuda.is_available()
    if transport == "symmetric" and not on_nccl:
        remedy = 'Use transport="auto", or a group over NCCL.'
        raise ArgumentError("transport", expected="an NCCL group for symmetric", got="gloo", remedy=remedy)
    if transport == "symmetric" and double:
        remedy = 'Use transport="nccl", or no inner_ring.'
        expected, got = "nccl for a ring of rings, whose far messages overtake others", "symmetric"
        raise ArgumentError("transport", expected=expected, got=got, remedy=remedy)
    own, faults = _own_gloo(ranks, [group], asked.deadline)
    control = ControlPlane(group, own, faults, optimistic=asked.optimistic and on_nccl)
    fields = {
        "transport": transport,
        "timeout": asked.deadline.total_seconds(),
        "inner_ring": double,
        "fixed_lengths": asked.optimistic,
    }
    control.agree({**fields, "rank": control.rank}, free="rank")
    _introduce(control)
    if not on_nccl:
        moves = GlooTransport(own, faults)
        return Connection(asked, control, moves, "gloo", "the group has no NCCL backend", ("cpu",), None)
    device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    if len(ranks) == 1:
        moves = GlooTransport(own, faults)
        return Connection(asked, control, moves, "nccl", "one rank sends nothing", ("cuda",), device)
    watch, reason = Watch(faults), "asked for"
    if transport == "auto" and double:
        reason = "a ring of rings"
    elif transport != "nccl":
        obstacle = peer_access_obstacle(control, device)
        if obstacle is None:
            moves, obstacle = _symmetric(control, own, device, watch)
            if moves is not None:
                reason = "all GPUs reach each other's memory" if transport == "auto" else reason
                return Connection(asked, control, moves, "symmetric", reason, ("cuda",), device, watch)
        if transport == "symmetric":
            remedy = 'Use transport="nccl", or "auto", which chooses by this.'
            expected = "GPUs that reach each other's memory for symmetric"
            raise ArgumentError("transport", expected=expected, got=obstacle, remedy=remedy, rank=control.rank)
        reason = f"symmetric is not possible: {obstacle}"
    near = nccl.new_group(group, device, timeout_of(group))
    moves = NcclTransport(near, faults, watch)
    if near is not group:
        faults.on_close(lambda: nccl.close(near))
    if double:  # messages that may take many hops must not delay messages that are due after one hop
        far = nccl.new_group(group, device, timeout_of(group))
        moves = TwoLinks(moves, NcclTransport(far, faults, watch))
        if far is not group:
            faults.on_close(lambda: nccl.close(far))
    return Connection(asked, control, moves, "nccl", reason, ("cuda",), device, watch)


def connect_mesh(
    mesh: DeviceMesh, names: tuple[str, str], places: Sequence[tuple[int, int]], ring: Connection
) -> MeshConnection:
    """Connects the ranks of both dimensions of a mesh; a collective of these ranks.

    Args:
        mesh: the mesh of the ranks.
        names: names of the ring's dimension, and of the dimension over which heads are split.
        places: (index along the ring, index along the heads) of each rank, in ascending order of global rank.
        ring: connection of this rank's ring.
    """
    deadline = ring.asked.deadline
    both = [mesh.get_group(name) for name in names]
    own, faults = _own_gloo(sorted(mesh.mesh.flatten().tolist()), both, deadline)
    faults.join(ring.control.faults)
    optimistic = ring.asked.optimistic and ring.kind != "gloo"
    control = MeshControlPlane(mesh, names, places, own, faults, optimistic=optimistic)
    _introduce(control)
    heads, watch = mesh.get_group(names[1]), None
    if ring.kind == "gloo":
        ranks = dist.get_process_group_ranks(heads)
        moves_over = new_group(ranks, [heads], timeout=deadline, backend="gloo")
        faults.on_break(lambda: gloo.close(moves_over))
        faults.on_close(lambda: groups.close(moves_over))
    else:
        assert ring.device is not None
        watch, moves_over = Watch(faults), nccl.new_group(heads, ring.device, timeout_of(heads))
        faults.on_release(lambda: nccl.abort(moves_over))
        if moves_over is not heads:
            faults.on_close(lambda: nccl.close(moves_over))
    return MeshConnection(ring, heads, control, ProcessGroupHeads(moves_over, faults, watch), watch)


def _own_gloo(
    ranks: Sequence[int], through: Sequence[dist.ProcessGroup], deadline: timedelta
) -> tuple[dist.ProcessGroup, Faults]:
    """Returns a gloo group that the ring owns, and the `Faults` that turn failed waits in this group into errors."""
    own = new_group(ranks, through, timeout=deadline, backend="gloo")
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(f"ringflash/{own.group_name}", world.get_group_store())
    faults = Faults(store, dist.get_rank(own), len(ranks), deadline.total_seconds())
    faults.on_break(lambda: gloo.close(own))
    faults.on_close(lambda: groups.close(own))
    return own, faults


def _introduce(control: ControlPlane) -> None:
    """Gives all ranks a store for reports, the identity of each process, and memory that they share; a collective."""
    # A new name: the store may outlive process groups, and then still holds reports of earlier rings.
    name = control.tell(uuid4().hex)[0]
    control.faults.store, control.faults.number = PrefixStore(name, control.faults.store), int(name[:15], 16) + 1
    control.faults.identities = control.tell(processes.own_identity())
    control.share_words()


def _symmetric(
    control: ControlPlane, group: dist.ProcessGroup, device: torch.device, watch: Watch
) -> tuple[Transport | None, str | None]:
    """Returns the symmetric transport, or the reason why a rank could not make it.

    Peer access between the GPUs is not enough: the system must also let processes share memory.
    """
    from ringflash.transport.symmetric import SymmetricTransport  # here: only CUDA builds of torch support it

    try:
        return SymmetricTransport(control, group, device, watch), None
    except RuntimeError as error:  # the same on all ranks
        return None, str(error)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the shortest timeout of the backends of `group`."""
    return min(timeouts_of(group))


def deadline_of(group: dist.ProcessGroup, timeout: timedelta | float | None) -> timedelta:
    """Returns the deadline of a ring over `group`.

    Args:
        group: the ranks.
        timeout: seconds or a timedelta. None means 5 minutes, or half the timeout of the group if that is shorter.

    Raises:
        ArgumentError: `timeout` is no number of seconds, not positive, or not shorter than the timeout of the group.
            The watchdog of the group would otherwise end the process before the ring raises.
    """
    limit = timeout_of(group)
    if timeout is None:
        return min(DEADLINE, limit / 2)
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | float | int):
        remedy = "Pass seconds or a datetime.timedelta."
        raise ArgumentError("timeout", expected="seconds or a timedelta", got=repr(timeout), remedy=remedy)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < limit.total_seconds():
        raise ArgumentError(
            "timeout",
            expected=f"more than 0 and less than the {limit.total_seconds():g} s of the process group",
            got=f"{seconds:g} s",
            remedy="The order is ring < NCCL watchdog < heartbeat < launcher, so that the first to give up says which "
            "rank was waited for: shorten this, or give init_process_group a longer timeout.",
        )
    return timedelta(seconds=seconds)


def peer_access_obstacle(control: ControlPlane, device: torch.device) -> str | None:
    """Returns the first reason why ranks cannot read each other's memory, or None; a collective.

    The text is the same on every rank.
    """
    own = {"host": platform.node(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}
    ranks = [json.loads(text) for text in control.tell(json.dumps(own))]
    found = [text for text in control.tell(_seen_from(control.rank, device, ranks)) if text]
    return found[0] if found else None


def _seen_from(rank: int, device: torch.device, ranks: list[dict[str, str]]) -> str:
    """Returns the first obstacle between this rank and another; empty if there is none."""
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, other in enumerate(ranks):
        if peer == rank:
            continue
        if other["host"] != ranks[rank]["host"]:
            return f"ranks {rank} and {peer} are on different hosts"
        if other["gpu"] == ranks[rank]["gpu"]:
            return f"ranks {rank} and {peer} share a GPU"
        if other["gpu"] not in visible:
            return f"the GPU of rank {peer} is hidden from rank {rank} (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(device, visible[other["gpu"]]):
            return f"the GPU of rank {rank} has no peer access to that of rank {peer}"
    return ""
