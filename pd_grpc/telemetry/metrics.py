"""Where instruments come from, and the little that all of them share."""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.metrics import Meter, MeterProvider

_SCOPE = "pd_grpc"


def meter(provider: MeterProvider | None = None) -> Meter:
    """What makes instruments: of `provider`, or of the process's own when it is None. Without a
    provider at all they record nothing."""
    return (provider or metrics.get_meter_provider()).get_meter(_SCOPE)
