"""What a load on a deployment comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_grpc.bench.serve.deployments import Run
from pd_grpc.bench.serve.timing import Heard, Objective, message_gaps_s, token_gaps_s
from pd_grpc.bench.statistics import percentile

SHARES = (0.5, 0.9, 0.99)


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 in milliseconds, null for none: each is one of the values."""
    return {
        f"p{100 * share:g}": 1000 * percentile(values_s, share) if values_s else None
        for share in SHARES
    }


def load_figures(run: Run, warm_up: int, objective: Objective) -> dict[str, Any]:
    """Of an open load, whose first `warm_up` requests do not count. Seconds are from the sending
    of the first that counts to the last token of the last to end."""
    counted = run.answers[warm_up:]
    whole = [answer for answer in counted if answer.finished]
    seconds = max(a.ended_s for a in counted) - min(a.sent_s for a in counted)
    good = sum(objective.met(answer) for answer in counted)
    tpots = [tpot for answer in whole if (tpot := answer.tpot_s) is not None]
    return {
        "sent": len(counted),
        "completed": len(whole),
        "failed": len(counted) - len(whole),
        "faults": sorted({answer.fault for answer in counted if answer.fault}),
        "seconds": seconds,
        "ttft_ms": percentiles_ms([answer.ttft_s for answer in whole]),
        "tpot_ms": percentiles_ms(tpots),
        "message_gap_ms": percentiles_ms([gap for a in whole for gap in message_gaps_s(a)]),
        "token_gap_ms": percentiles_ms([gap for a in whole for gap in token_gaps_s(a)]),
        "tokens_per_message": _per_message(whole),
        "goodput_share": good / len(counted),
        "goodput_per_s": good / seconds if seconds else 0.0,
        "tokens_per_s": sum(answer.tokens for answer in whole) / seconds if seconds else 0.0,
        "cpu_s": dict(run.cpu_s),
        "cores_busy": sum(run.cpu_s.values()) / run.wall_s,
        # So that any other objective can be looked at afterwards.
        "each": [_as_kept(answer) for answer in counted],
    }


def _per_message(answers: Sequence[Heard]) -> float | None:
    messages = sum(len(answer.messages) for answer in answers)
    return sum(answer.tokens for answer in answers) / messages if messages else None


def _as_kept(answer: Heard) -> str:
    if not answer.finished:
        return answer.fault
    tpot = "" if (tpot_s := answer.tpot_s) is None else f", {1000 * tpot_s:.2f} ms a token"
    return f"{answer.tokens} tokens, first after {1000 * answer.ttft_s:.1f} ms{tpot}"
