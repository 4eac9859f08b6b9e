"""The knobs of a prepare pool."""

from __future__ import annotations

from pd_grpc.prefill.prepare import PrepareLimits
from pd_grpc.protocol.config import PrefillConfig


def limits(window: int, total: int, ahead: int, **more: float) -> PrepareLimits:
    """As configured so, and all else as it is by default."""
    sizes = {"prepare_window": window, "prepare_total": total, "prepare_ahead": ahead}
    return PrepareLimits.of(PrefillConfig.model_validate({**sizes, **more}))
