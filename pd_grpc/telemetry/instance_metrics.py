"""What instances of several roles count alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments

OK = "ok"

Key = TypeVar("Key", bound=Hashable)
State = TypeVar("State", bound=Hashable)


class Reason(Protocol):
    """Why something ended, as one of few."""

    @property
    def value(self) -> Any:
        """Its name on the wire."""
        ...


class Failure(Protocol):
    """What ended a call or a request."""

    @property
    def reason(self) -> Reason:
        """Its class."""
        ...


def outcome_of(fault: Failure | None) -> str:
    """ "ok", or the reason of the fault that ended it."""
    return OK if fault is None else str(fault.reason.value)


def stages_ahead(
    stages: Mapping[State, str], transitions: Mapping[State, Collection[State]]
) -> Mapping[State, frozenset[str]]:
    """The stages in which a request in each state may yet spend time, that of the state among them.
    `stages` has those of all states but the last."""

    def ahead(state: State) -> frozenset[str]:
        seen, next_ones = {state}, [state]
        while next_ones:
            for after in transitions[next_ones.pop()]:
                if after not in seen:
                    seen.add(after)
                    next_ones.append(after)
        return frozenset(stages[each] for each in seen if each in stages)

    return {state: ahead(state) for state in transitions}


class InstanceMetrics:
    """What every instance counts."""

    def __init__(self, instruments: Instruments, role: str, reasons: Iterable[Reason]) -> None:
        """`reasons` are all that a fault may have: each is there with 0 from the start, for of a
        counter that begins at 1 Prometheus sees no increase."""
        self._instruments = instruments
        self._role = {names.ATTR_METRIC_ROLE: role}
        self._stages = instruments.histogram(names.METRIC_STAGE_DURATION)
        self._refusals = instruments.counter(names.METRIC_REFUSALS)
        for reason in reasons:
            self._count_refusal(reason, 0)

    def watch_late_events(self, late_events: Callable[[], int]) -> None:
        """Looked at when it is exported, from whichever thread, as all that is watched."""
        self._instruments.watched_counter(
            names.METRIC_LATE_EVENTS, lambda: [(late_events(), self._role)]
        )

    def stage(self, stage: str, seconds: float, fault: Failure | None) -> None:
        """A request has left a stage for good, or a fault has ended it there."""
        about = {names.ATTR_METRIC_STAGE: stage, names.ATTR_OUTCOME: outcome_of(fault)}
        self._stages.record(seconds, {**self._role, **about})

    def refused(self, fault: Failure) -> None:
        """A call has ended with a fault."""
        self._count_refusal(fault.reason, 1)

    def _count_refusal(self, reason: Reason, number: int) -> None:
        self._refusals.add(number, {**self._role, names.ATTR_METRIC_REASON: str(reason.value)})


class MachineMetrics(InstanceMetrics, Generic[Key]):
    """What P and D count alike: the stages of their requests, their pool, and KV on its way."""

    def __init__(
        self,
        instruments: Instruments,
        role: str,
        reasons: Iterable[Reason],
        now: Callable[[], float],
    ) -> None:
        super().__init__(instruments, role, reasons)
        self._now = now
        self._since: dict[Key, float] = {}
        self._spent: dict[Key, dict[str, float]] = {}
        self._moving: dict[Key, tuple[float, str]] = {}
        self._bytes = instruments.counter(names.METRIC_TRANSFER_BYTES)
        self._transfers = instruments.histogram(names.METRIC_TRANSFER_DURATION)
        self._expired = instruments.counter(names.METRIC_LEASE_EXPIRED)
        self._side = {names.ATTR_METRIC_SIDE: role}
        self._expired.add(0, self._side)

    def watch_pool(self, blocks: Callable[[], Mapping[Any, int]]) -> None:
        """`blocks` by state, an enum whose names in small letters are the labels."""
        self._instruments.gauge(
            names.METRIC_BLOCKS,
            lambda: [
                (number, {**self._role, names.ATTR_METRIC_STATE: state.name.lower()})
                for state, number in blocks().items()
            ],
        )

    def watch_prefix_cache(self, asked: Callable[[], int], found: Callable[[], int]) -> None:
        """Tokens that were looked up since the start, and those of them that were there."""
        watch, role = self._instruments.watched_counter, self._role
        watch(names.METRIC_PREFIX_LOOKUP_TOKENS, lambda: [(asked(), role)])
        watch(names.METRIC_PREFIX_HIT_TOKENS, lambda: [(found(), role)])

    def watch_queue(self, tokens: Callable[[], int]) -> None:
        """Prompt tokens of requests that wait."""
        self._instruments.gauge(names.METRIC_QUEUE_TOKENS, lambda: [(tokens(), self._role)])

    def moved(
        self, key: Key, left: str | None, ahead: Collection[str], fault: Failure | None
    ) -> None:
        """A request has left the stage `left`, None when it is new, and may come to those `ahead`;
        it is over when there are none. Of each stage it is counted once, with all its visits, when
        it can come there no more."""
        now = self._now()
        since = self._since.pop(key, now)
        spent = self._spent.setdefault(key, {})
        if left is not None:
            spent[left] = spent.get(left, 0.0) + now - since
        for stage in [each for each in spent if each not in ahead]:
            self.stage(stage, spent.pop(stage), fault if stage == left else None)
        if ahead:
            self._since[key] = now
        else:
            del self._spent[key]

    def in_flight(self, key: Key) -> bool:
        """Whether the request has come and is not over."""
        return key in self._since

    def transfer_begins(self, key: Key, transport: str) -> None:
        """The KV of a request is on its way, by a transport's name."""
        self._moving[key] = self._now(), transport

    def transfer_ends(self, key: Key, fault: Failure | None) -> None:
        """All of its KV is there or never will be; nothing if it was not on its way."""
        moving = self._moving.pop(key, None)
        if moving is not None:
            since, transport = moving
            how = {names.ATTR_OUTCOME: outcome_of(fault), names.ATTR_METRIC_TRANSPORT: transport}
            self._transfers.record(self._now() - since, {**self._role, **how})

    def verified(self, payload_bytes: int, transport: str) -> None:
        """So many more bytes have been verified that came by a transport of this name."""
        self._bytes.add(payload_bytes, {**self._role, names.ATTR_METRIC_TRANSPORT: transport})

    def lease_expired(self) -> None:
        """A lease was not renewed."""
        self._expired.add(1, self._side)
