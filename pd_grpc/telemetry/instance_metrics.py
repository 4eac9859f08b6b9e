"""What P and D, or all three, count alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import Instruments

OK = "ok"


class InstanceMetrics:
    """The metrics that instances of several roles have."""

    def __init__(self, instruments: Instruments, role: str) -> None:
        self._instruments = instruments
        self._role = {names.ATTR_METRIC_ROLE: role}
        self._stages = instruments.histogram(names.METRIC_STAGE_DURATION)
        self._refusals = instruments.counter(names.METRIC_REFUSALS)

    def watch(
        self,
        late_events: Callable[[], int],
        blocks: Callable[[], Mapping[str, int]] | None = None,
        queued_tokens: Callable[[], int] | None = None,
    ) -> None:
        """What is looked at when it is exported, from whichever thread; `blocks` by state."""
        self._instruments.watched_counter(names.METRIC_LATE_EVENTS, lambda: [(late_events(), {})])
        if blocks is not None:
            self._instruments.gauge(
                names.METRIC_BLOCKS,
                lambda: [
                    (number, {**self._role, names.ATTR_METRIC_STATE: state})
                    for state, number in blocks().items()
                ],
            )
        if queued_tokens is not None:
            self._instruments.gauge(
                names.METRIC_QUEUE_TOKENS, lambda: [(queued_tokens(), self._role)]
            )

    def stage(self, stage: str, seconds: float, outcome: str = OK) -> None:
        """A request has left a stage; `outcome` is the reason of the fault that ended it there."""
        self._stages.record(seconds, {names.ATTR_METRIC_STAGE: stage, names.ATTR_OUTCOME: outcome})

    def refused(self, reason: str) -> None:
        """A call has ended with a fault."""
        self._refusals.add(1, {names.ATTR_METRIC_REASON: reason})


class TransferMetrics:
    """KV on its way, as P or D sees it."""

    def __init__(self, instruments: Instruments, role: str) -> None:
        self._role = {names.ATTR_METRIC_ROLE: role}
        self._bytes = instruments.counter(names.METRIC_TRANSFER_BYTES)
        self._duration = instruments.histogram(names.METRIC_TRANSFER_DURATION)
        self._expired = instruments.counter(names.METRIC_LEASE_EXPIRED)

    def verified(self, payload_bytes: int) -> None:
        """So many more bytes have been verified."""
        self._bytes.add(payload_bytes, self._role)

    def ended(self, seconds: float, outcome: str = OK) -> None:
        """All of a request's KV is there, or never will be."""
        self._duration.record(seconds, {**self._role, names.ATTR_OUTCOME: outcome})

    def expired(self) -> None:
        """A lease was not renewed."""
        self._expired.add(1, {names.ATTR_METRIC_SIDE: self._role[names.ATTR_METRIC_ROLE]})
