"""Which prefill and which decode instance a request goes to.

A policy sees names and the router's own count of what is in flight; it holds no connection. A later
policy (prefix affinity, reported load) takes the place of `LeastLoad` behind the same three calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.protocol.faults import Fault, Reason


@dataclass(frozen=True)
class Target:
    """An instance a request can be sent to; `epoch` 0 is one whose process is not known."""

    name: str
    endpoint: str
    epoch: int = 0


@dataclass
class _Load:
    requests: int = 0
    tokens: int = 0
    last_chosen: int = 0


class LeastLoad:
    """Chooses the instance with the fewest tokens in flight, then the fewest requests; among equals
    the one chosen longest ago, so that idle instances take turns.

    Loads are keyed by endpoint: a restarted instance keeps the requests that are still charged to
    it until they end.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._choices = 0

    def ranked(self, ready: Sequence[Target]) -> list[Target]:
        """The targets, best first."""
        return sorted(ready, key=lambda target: self._rank(target.endpoint))

    def charge(self, endpoint: str, tokens: int) -> None:
        """A request of `tokens` tokens has been sent there."""
        load = self._loads.setdefault(endpoint, _Load())
        self._choices += 1
        load.requests += 1
        load.tokens += tokens
        load.last_chosen = self._choices

    def discharge(self, endpoint: str, tokens: int) -> None:
        """It has ended, or moved elsewhere."""
        load = self._loads[endpoint]
        load.requests -= 1
        load.tokens -= tokens

    def in_flight(self, endpoint: str) -> tuple[int, int]:
        """Requests and tokens charged to an endpoint."""
        load = self._loads.get(endpoint, _Load())
        return load.requests, load.tokens

    def _rank(self, endpoint: str) -> tuple[int, int, int]:
        load = self._loads.get(endpoint, _Load())
        return load.tokens, load.requests, load.last_chosen


@dataclass(frozen=True)
class Pairing:
    """Where one request goes: to a prefill and a decode instance, with the other decode instances
    that P may turn to; in aggregated mode to a decode instance alone."""

    prefill: Target | None
    decode: Target
    alternates: tuple[Target, ...] = ()


def pair(
    prefill: Sequence[Target],
    decode: Sequence[Target],
    prefill_load: LeastLoad,
    decode_load: LeastLoad,
    aggregated: bool,
) -> Pairing:
    """Pair the least loaded of the ready instances. Fault NO_INSTANCE names the role that lacks."""
    if not aggregated and not prefill:
        raise no_instance("prefill")
    if not decode:
        raise no_instance("decode")
    first, *others = decode_load.ranked(decode)
    if aggregated:
        return Pairing(None, first)
    return Pairing(prefill_load.ranked(prefill)[0], first, tuple(others))


def pair_beside(
    prefill: Target | None,
    decode: Target,
    ready_prefill: Sequence[Target],
    ready_decode: Sequence[Target],
    prefill_load: LeastLoad,
    decode_load: LeastLoad,
) -> Pairing:
    """The pair of a request whose prompt these instances know: they themselves, unless one takes no
    requests any more and another of its role does."""
    others = [target for target in decode_load.ranked(ready_decode) if target != decode]
    if decode not in ready_decode and others:
        decode, *others = others
    if prefill is None:
        return Pairing(None, decode)
    if prefill not in ready_prefill and ready_prefill:
        prefill = prefill_load.ranked(ready_prefill)[0]
    return Pairing(prefill, decode, tuple(others))


def no_instance(role: str) -> Fault:
    """No instance of a role takes requests."""
    return Fault(Reason.NO_INSTANCE, f"no {role} instance is ready", {"role": role})
