"""What a session with D tells the requests that are bound to it."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.protocol.faults import Fault
from pd_grpc.v1 import decode_pb2


@dataclass(frozen=True)
class Opened:
    """Calls may be made in the session's name."""


@dataclass(frozen=True)
class Unreachable:
    """A try to connect has failed. Within grace there will be another, which may still save those
    that hold grants."""

    fault: Fault


@dataclass(frozen=True)
class Refused:
    """D, or what answers in its place, will have none of us. `name` is the D that was asked for."""

    fault: Fault
    name: str


@dataclass(frozen=True)
class Lost:
    """D as we knew it is gone, with every grant and every Allocate in flight."""

    fault: Fault


@dataclass(frozen=True)
class Draining:
    """D grants nothing new."""


@dataclass(frozen=True)
class UnknownGrants:
    """D does not know these grants, which a heartbeat listed."""

    grant_ids: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """A transfer has ended on D."""

    ended: decode_pb2.TransferEnded


@dataclass(frozen=True)
class Left:
    """We have said goodbye, for want of anything to do."""


Notice = Opened | Unreachable | Refused | Lost | Draining | UnknownGrants | Ended | Left
