"""Every metric with its unit and its description, in one place, and what makes the instruments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import metrics
from opentelemetry.metrics import (
    CallbackOptions,
    Counter,
    Histogram,
    Meter,
    MeterProvider,
    Observation,
)
from opentelemetry.util.types import AttributeValue

from pd_grpc.telemetry import names

_SCOPE = "pd_grpc"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds of durations: a millisecond to five minutes, the longest budget by default."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
BYTES = tuple(float(4**n) for n in range(5, 18))
"""1 KiB to 16 GiB."""


@dataclass(frozen=True)
class Instrument:
    """What one metric is. `labels` are all it may have, none with a value for each request;
    `bounds` make it a histogram."""

    name: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_RPC = (
    names.ATTR_RPC_SYSTEM,
    names.ATTR_RPC_METHOD,
    names.ATTR_STATUS_CODE,
    names.ATTR_ERROR_TYPE,
)
_OUTCOME, _REASON, _DECODE = names.ATTR_OUTCOME, names.ATTR_METRIC_REASON, names.ATTR_METRIC_DECODE
_ROLE, _TRANSPORT = names.ATTR_METRIC_ROLE, names.ATTR_METRIC_TRANSPORT
_GEN_AI = (names.ATTR_GEN_AI_OPERATION, names.ATTR_GEN_AI_PROVIDER, names.ATTR_GEN_AI_MODEL)

CATALOG: Mapping[str, Instrument] = {
    each.name: each
    for each in (
        Instrument(
            names.METRIC_STAGE_DURATION,
            "s",
            "time that requests spent in a stage",
            (_ROLE, names.ATTR_METRIC_STAGE, _OUTCOME),
            SECONDS,
        ),
        Instrument(
            names.METRIC_BLOCKS,
            "{block}",
            "blocks of the KV pool by state; the sum is the pool",
            (_ROLE, names.ATTR_METRIC_STATE),
        ),
        Instrument(
            names.METRIC_PREFIX_LOOKUP_TOKENS,
            "{token}",
            "tokens of whole blocks that were looked up in the prefix cache, once for each grant on"
            " D and each request that P computes",
            (_ROLE,),
        ),
        Instrument(
            names.METRIC_PREFIX_HIT_TOKENS,
            "{token}",
            "of those, the ones whose KV was there: on D not to be sent, on P not to be computed",
            (_ROLE,),
        ),
        Instrument(
            names.METRIC_TRANSFER_BYTES,
            "By",
            "KV that D has verified",
            (_ROLE, _TRANSPORT),
        ),
        Instrument(
            names.METRIC_TRANSFER_DURATION,
            "s",
            "from the first KV chunk of a request, on P from the start of its compute, to its last",
            (_ROLE, _OUTCOME, _TRANSPORT),
            SECONDS,
        ),
        Instrument(
            names.METRIC_REFUSALS,
            "{call}",
            "calls that ended with a fault, by reason",
            (_ROLE, _REASON),
        ),
        Instrument(
            names.METRIC_LEASE_EXPIRED,
            "{transfer}",
            "transfers that ended because nobody renewed their lease",
            (names.ATTR_METRIC_SIDE,),
        ),
        Instrument(
            names.METRIC_LATE_EVENTS,
            "{event}",
            "events that came too late or again and changed nothing",
            (_ROLE,),
        ),
        Instrument(
            names.METRIC_DECISION,
            "{request}",
            "requests by how they are served",
            (names.ATTR_METRIC_DECISION, names.ATTR_METRIC_WHY),
        ),
        Instrument(
            names.METRIC_SECOND_TOKEN_GAP,
            "s",
            "from the first token to the second: what hand-over adds to an answer",
            (),
            SECONDS,
        ),
        Instrument(
            names.METRIC_WASTED_TOKENS,
            "{token}",
            "tokens computed for requests that were not handed off",
            (_REASON,),
        ),
        Instrument(
            names.METRIC_QUEUE_TOKENS,
            "{token}",
            "prompt tokens of requests that wait: on P for a grant, on D for blocks",
            (_ROLE,),
        ),
        Instrument(names.METRIC_PREPARE_IN_FLIGHT, "{request}", "Allocates in flight", (_DECODE,)),
        Instrument(
            names.METRIC_PREPARE_WAITING,
            "{request}",
            "requests that wait for their turn to ask",
            (_DECODE,),
        ),
        Instrument(
            names.METRIC_PREPARE_BREAKER_OPEN,
            "{breaker}",
            "1 while the breaker is open",
            (_DECODE,),
        ),
        Instrument(names.METRIC_PREPARE_READY, "{request}", "grants not yet computed"),
        Instrument(
            names.METRIC_PREPARE_WAIT,
            "s",
            "from the call to the grant, or to the end of a request that got none",
            (_OUTCOME,),
            SECONDS,
        ),
        Instrument(
            names.METRIC_ROUTER_RETRIES,
            "{attempt}",
            "attempts elsewhere of requests without a token yet",
            (_REASON,),
        ),
        Instrument(
            names.METRIC_ROUTER_CONTINUATIONS,
            "{attempt}",
            "attempts elsewhere of requests in mid-answer",
            (_REASON,),
        ),
        Instrument(
            names.METRIC_ROUTER_RETRIES_REFUSED,
            "{attempt}",
            "attempts elsewhere that the retry budget forbade",
            (_REASON,),
        ),
        Instrument(
            names.METRIC_ROUTER_RETRY_BUDGET,
            "{attempt}",
            "attempts elsewhere that the retry budget has left",
        ),
        Instrument(
            names.METRIC_TTFT,
            "s",
            "from a request to its first token, by the router's clock",
            _GEN_AI,
            SECONDS,
        ),
        Instrument(
            names.METRIC_TPOT,
            "s",
            "time for each token after the first",
            _GEN_AI,
            SECONDS,
        ),
        Instrument(
            names.METRIC_REQUEST_DURATION,
            "s",
            "from a request to its end",
            (*_GEN_AI, names.ATTR_ERROR_TYPE),
            SECONDS,
        ),
        Instrument(
            names.METRIC_RPC_SERVER_DURATION,
            "s",
            "calls served, from the first header to the status",
            _RPC,
            SECONDS,
        ),
        Instrument(
            names.METRIC_RPC_CLIENT_DURATION,
            "s",
            "calls made, from the first header to the status",
            (*_RPC, names.ATTR_SERVER_ADDRESS, names.ATTR_SERVER_PORT),
            SECONDS,
        ),
    )
}

Read = Callable[[], Iterable[tuple[float, Mapping[str, AttributeValue]]]]
"""The values of a metric and their labels, now; called from whichever thread exports."""


class Instruments:
    """Makes the instruments of the catalog for one instance. Without a provider at all they record
    nothing."""

    def __init__(self, instance: str, provider: MeterProvider | None = None) -> None:
        """Of `provider`, or of the process's own when it is None. Each instance has a scope of its
        own, so that several in one process are told apart."""
        source = provider or metrics.get_meter_provider()
        scope = {names.ATTR_INSTANCE: instance}
        self._meter: Meter = source.get_meter(_SCOPE, attributes=scope)

    def counter(self, name: str) -> Counter:
        """What only grows."""
        about = CATALOG[name]
        return self._meter.create_counter(name, about.unit, about.description)

    def histogram(self, name: str) -> Histogram:
        """What is spread."""
        about = CATALOG[name]
        return self._meter.create_histogram(
            name, about.unit, about.description, explicit_bucket_boundaries_advisory=about.bounds
        )

    def gauge(self, name: str, read: Read) -> None:
        """What is looked at when it is exported."""
        about = CATALOG[name]
        self._meter.create_observable_gauge(name, [_observe(read)], about.unit, about.description)

    def watched_counter(self, name: str, read: Read) -> None:
        """What only grows and is counted elsewhere."""
        about = CATALOG[name]
        self._meter.create_observable_counter(name, [_observe(read)], about.unit, about.description)


def _observe(read: Read) -> Callable[[CallbackOptions], Sequence[Observation]]:
    return lambda options: [Observation(value, dict(labels)) for value, labels in read()]
