"""A process of the world: a machine with a shell that speaks to the modelled wire.

What the shells of the servers do with sockets and threads is done here step by step: the control
loop hears the wire, the engine and the bulk side are served when the world says so, and between any
two steps anything else may happen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.digest import EPOCH_OF_TIME
from pd_grpc.testing.explorer.kv import WrongKv
from pd_grpc.testing.explorer.wire import (
    CANCEL,
    CLOSE,
    DOWN,
    END,
    OPEN,
    POST,
    UP,
    WATCH,
    WRITE,
    Interned,
    Op,
    as_sent,
)

DEFECTS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    Fault,
    TransportFault,
)
"""What a machine must not raise, whatever happens."""


class Violation(NamedTuple):
    """An invariant that does not hold."""

    invariant: str
    text: str


_MICROSECOND = 1e-6
"""The least that time can pass."""

Input: TypeAlias = tuple[Any, ...]
"""What happens to a process: ("up" or "down", call, message), ("elapse", seconds), or the name of a
step of its own."""


@dataclass(frozen=True)
class Looks:
    """What of a process's state others may see: its own steps that are possible, when it must be
    woken (seconds from now), whether nothing of a request is left in it, and what it knows."""

    steps: tuple[str, ...]
    wake_s: float | None
    settled: bool
    facts: Any
    may_drain: bool = False
    """Whether it can be told to take nothing new."""
    writes: frozenset[tuple[str, int, str, int]] = frozenset()
    """Of a P, what it may yet write into the memory of Ds: name, epoch, grant and block."""
    writable: frozenset[tuple[str, int]] | None = frozenset()
    """Of a D, its blocks that a P may write to, each with the grant in whose name; None for all."""
    quarantined: bool = False
    """Whether a D has blocks that it can give to nobody."""
    rows: tuple[tuple[str, bool], ...] = ()
    """Whose rows are in the step that an engine takes, and whether a token is chosen for each."""
    awaited: frozenset[tuple[TransferKey, str, int]] = frozenset()
    """The transfers for whose writers a D waits, each with the writer's name and epoch."""


class Process(ABC):
    """One process, from its start to its crash. `epoch` tells it from its successors."""

    fine = True
    """Whether its control loop and its bulk side are two, between which other things may happen."""

    lends = False
    """Whether others know its blocks by their numbers."""

    def __init__(self, name: str, epoch: int, ids: Interned) -> None:
        self.name = name
        self.epoch = epoch
        self.now = EPOCH_OF_TIME
        self._ids = ids
        self._ops: list[Op] = []
        self._violations: list[Violation] = []
        self._opened: Counter[tuple[str, str, str]] = Counter()

    def take(self, happens: Input) -> tuple[tuple[Op, ...], tuple[Violation, ...]]:
        """Let something happen; what it does to the wire, and what is wrong."""
        if happens[0] == "elapse":
            self.now = round(self.now + happens[1], 6)
            return (), ()
        try:
            self._happen(happens)
            self._happened()
            self._check()
        except WrongKv as wrong:
            self._wrong("no token from unverified KV", str(wrong))
        except DEFECTS as defect:
            self._wrong("no machine raises", f"{type(defect).__name__}: {defect}")
        ops, violations = tuple(self._ops), tuple(self._violations)
        self._ops, self._violations = [], []
        return ops, violations

    @abstractmethod
    def looks(self) -> Looks:
        """What it looks like now."""

    @abstractmethod
    def left_over(self) -> list[str]:
        """What it still holds though everything is over; empty when all is well."""

    @abstractmethod
    def _happen(self, happens: Input) -> None:
        """Carry it out."""

    def _happened(self) -> None:
        """It has been carried out."""
        if not self.fine:
            self._catch_up()

    def _catch_up(self) -> None:  # noqa: B027 - a client has no bulk side
        """Let the bulk side and the control loop hear what they have to say to each other."""

    @abstractmethod
    def _check(self) -> None:
        """See that what must hold at any time does."""

    def _wrong(self, invariant: str, text: str) -> None:
        self._violations.append(Violation(invariant, f"{self.name}: {text}"))

    # --- the wire --------------------------------------------------------------------------------

    def _open(self, kind: str, server: str, name: str, message: str, body: Any) -> int:
        self._opened[kind, server, name] += 1
        again = self._opened[kind, server, name]
        name = f"{self.epoch}/{name}" if again == 1 else f"{self.epoch}/{name}/{again}"
        call = self._ids.call(kind, self.name, server, name)
        self._ops.append(Op(OPEN, call, self._ids.message(message, body)))
        return call

    def _watch(self, server: str) -> int:
        """Open a watch of a server, which waits for it until it is there."""
        self._opened["watch", server, server] += 1
        name = f"{self.epoch}/{server}/{self._opened['watch', server, server]}"
        call = self._ids.call("watch", self.name, server, name)
        self._ops.append(Op(WATCH, call, self._ids.message("watch")))
        return call

    def _post(self, kind: str, server: str, name: str, body: Any) -> None:
        call = self._ids.call(kind, self.name, server, f"{self.epoch}/{name}")
        self._ops.append(Op(POST, call, self._ids.message(kind, body)))

    def _up(self, call: int, message: str, body: Any = None) -> None:
        self._ops.append(Op(UP, call, self._ids.message(message, body)))

    def _down(self, call: int, message: str, body: Any = None) -> None:
        self._ops.append(Op(DOWN, call, self._ids.message(message, body)))

    def _end(self, call: int, fault: Fault | None) -> None:
        self._ops.append(Op(END, call, self._ids.message(END, as_sent(fault))))

    def _write(self, call: int, body: Any) -> None:
        """Write into memory that was lent by a call."""
        self._ops.append(Op(WRITE, call, self._ids.message("write", body)))

    def _cancel(self, call: int) -> None:
        self._ops.append(Op(CANCEL, call))

    def _close(self, call: int) -> None:
        self._ops.append(Op(CLOSE, call))

    def _wake_s(self, *moments: float | None) -> float | None:
        known = [at for at in moments if at is not None]
        if not known:
            return None
        left_s = min(known) - self.now
        return max(_MICROSECOND, round(left_s, 6)) if left_s > 0 else 0.0


FIRST_SHARD = 2
"""The port of a D's first shard; the others have those after it."""


def server_of(endpoint: str) -> str:
    """The process behind an endpoint."""
    return endpoint.partition(":")[0]


def shard_name(endpoint: str) -> str:
    """What tells the calls of a shard from those of the first, for which it is empty."""
    shard = int(endpoint.partition(":")[2]) - FIRST_SHARD
    return f"@{shard}" * bool(shard)


def shard_of(call: str) -> int:
    """The shard that a call with this name is made to."""
    return int(call.partition("@")[2] or 0)
