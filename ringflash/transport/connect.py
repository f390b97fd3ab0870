"""Joins the ranks of a process group into a ring: groups of its own, deadlines, and the transport that fits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
from torch.distributed.distributed_c10d import _get_default_store

from ringflash.errors import ArgumentError
from ringflash.transport import gloo, nccl, processes, reach
from ringflash.transport.base import Transport
from ringflash.transport.control import ControlPlane
from ringflash.transport.faults import Faults
from ringflash.transport.gloo import GlooTransport
from ringflash.transport.nccl import NcclTransport
from ringflash.transport.watch import Watch

TRANSPORTS = ("auto", "nccl", "symmetric")
DEADLINE = timedelta(minutes=5)


@dataclass(frozen=True)
class Connection:
    """How the ranks of one group talk.

    Args:
        asked: group, transport and deadline as they were asked for.
        control: agrees on calls.
        transport: moves keys, values and their gradients.
        kind: "nccl", "gloo" or "symmetric".
        reason: why that one.
        devices: types of the devices whose tensors it moves.
        device: the only one, where there is one.
    """

    asked: tuple[dist.ProcessGroup, str, timedelta]
    control: ControlPlane
    transport: Transport
    kind: str
    reason: str
    devices: tuple[str, ...]
    device: torch.device | None

    def serves(self, group: dist.ProcessGroup, transport: str, deadline: timedelta) -> bool:
        """Whether it joins the ranks of this very `group`, as asked for, and its ring has not broken."""
        return self.asked == (group, transport, deadline) and self.control.faults.error is None


def connect(group: dist.ProcessGroup, transport: str, deadline: timedelta) -> Connection:
    """Makes a ring of the ranks of `group`, a collective of them.

    Args:
        group: the ranks.
        transport: one of `TRANSPORTS`.
        deadline: how long a rank waits for another.

    Raises:
        ArgumentError: `transport` cannot join these ranks.
        RankMismatch: ranks ask for different things.
    """
    asked, ranks = (group, transport, deadline), dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        remedy = "Make the group with sort_ranks=True, the default."
        raise ArgumentError("mesh_or_group", expected="ranks in ascending order", got=ranks, remedy=remedy)
    on_nccl = backend_of(group, "cuda") == "nccl" and torch.cuda.is_available()
    if transport == "symmetric" and not on_nccl:
        remedy = 'Use transport="auto", or a group over NCCL.'
        raise ArgumentError("transport", expected="an NCCL group for symmetric", got="gloo", remedy=remedy)
    own = dist.new_group(
        ranks, timeout=deadline, backend="gloo", use_local_synchronization=True, group_desc="ringflash"
    )
    assert isinstance(own, dist.ProcessGroup)
    store = PrefixStore(f"ringflash/{own.group_name}", _get_default_store())
    faults = Faults(store, dist.get_rank(group), len(ranks), deadline.total_seconds())
    faults.on_break(lambda: gloo.close(own))
    control = ControlPlane(group, own, faults)
    control.agree({"transport": transport, "timeout": deadline.total_seconds(), "rank": control.rank}, free="rank")
    # A name never used before: a store may outlive process groups, and words of earlier rings with it.
    faults.store = PrefixStore(control.tell(uuid4().hex)[0], store)
    faults.identities = control.tell(processes.own_identity())
    if not on_nccl:
        moves = GlooTransport(own, faults)
        return Connection(asked, control, moves, "gloo", "the group has no NCCL backend", ("cpu",), None)
    device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    if len(ranks) == 1:
        moves = GlooTransport(own, faults)
        return Connection(asked, control, moves, "nccl", "one rank sends nothing", ("cuda",), device)
    watch, reason = Watch(faults), "asked for"
    if transport != "nccl":
        obstacle = reach.obstacle(control, device)
        if obstacle is None:
            moves, obstacle = _symmetric(control, own, device, watch)
            if moves is not None:
                reason = "all GPUs reach each other's memory" if transport == "auto" else reason
                return Connection(asked, control, moves, "symmetric", reason, ("cuda",), device)
        if transport == "symmetric":
            remedy = 'Use transport="nccl", or "auto", which chooses by this.'
            expected = "GPUs that reach each other's memory for symmetric"
            raise ArgumentError("transport", expected=expected, got=obstacle, remedy=remedy, rank=control.rank)
        reason = f"symmetric is not possible: {obstacle}"
    moves = NcclTransport(nccl.new_group(group, device, timeout_of(group)), faults, watch)
    return Connection(asked, control, moves, "nccl", reason, ("cuda",), device)


def _symmetric(
    control: ControlPlane, group: dist.ProcessGroup, device: torch.device, watch: Watch
) -> tuple[Transport | None, str | None]:
    """The symmetric transport, or why a rank could not make it: it also takes a system that lets processes share."""
    from ringflash.transport.symmetric import SymmetricTransport  # here: only CUDA builds of torch have it all

    moves, failure = None, ""
    try:
        moves = SymmetricTransport(control, group, device, watch)
    except RuntimeError as error:
        failure = f"rank {control.rank}: {error}"
    failures = [text for text in control.tell(failure) if text]
    return (None, failures[0]) if failures else (moves, None)


def backend_of(group: dist.ProcessGroup, device: str) -> str | None:
    """The name of the backend that serves tensors on `device` in `group`."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return next((backend for name, backend in pairs if name == device), None)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the backends of `group` wait before they give up, the least of them."""
    return min(group._get_backend(device).options._timeout for device in group._device_types)


def deadline_of(group: dist.ProcessGroup, timeout: timedelta | float | None) -> timedelta:
    """The deadline of a ring over `group`: `timeout`, in seconds if a number, by default 5 minutes or half the group's.

    Raises:
        ArgumentError: not positive, or not shorter than the group's, whose watchdog would then end the process first.
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
