"""What the runs of the cases say, and the figures to reach."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pd_grpc.bench.engine.cases import MIXED_BATCH, MIXED_LENGTHS, PREFILL_TOKENS, Case, Timed
from pd_grpc.bench.statistics import estimate
from pd_grpc.bench.targets import Target

TARGETS = (
    Target("decode_ratio_b1", least=1.0),
    Target("decode_ratio_b4", least=1.0),
    Target("decode_ratio_b16", least=1.2),
    Target("decode_ratio_mixed", least=1.2),
    Target("prefill_ratio", least=0.95),
)
COMPARES: Mapping[str, str] = {
    "ours": "the torch engine through its Engine interface: prefill in chunks as the servers cut "
    "them, then decode steps, over blocks scattered in a pool; greedy",
    "generate": "transformers' model.generate on a second copy of the same weights, loaded with its"
    " default attention (sdpa); a key-value cache, greedy, min_new_tokens and max_new_tokens alike,"
    " no end-of-sequence token, shorter prompts padded on the left with a mask",
}
READING: Mapping[str, str] = {
    "decode_ratio_*": "time of generate over time of ours for the same decode steps: all from the "
    "first new token to the last. Of generate that is between what a streamer is given first and "
    "last; of ours from the return of the last prefill to that of the last decode. The median of "
    "the rounds, of which each runs both",
    "prefill_ratio": f"the same for one prompt of {PREFILL_TOKENS:,} tokens, from the call to its "
    "first new token",
    "decode_tokens_per_s": "new tokens of all prompts but the first of each, over that time",
    "prefill_tokens_per_s": "tokens of prompts, over the time until all have their first new token",
    "mixed": f"{MIXED_BATCH} lengths drawn evenly from {MIXED_LENGTHS[0]} to {MIXED_LENGTHS[1]} "
    "with a fixed seed",
    "same_tokens": "prompts whose new tokens are all the same on both sides, of how many; in "
    "float32 all have to be, in a narrower dtype roundings differ",
}
DECODED = ("b1", "b4", "b16", "mixed")
FIGURES = (*(target.figure for target in TARGETS), "wrong_answers", "took_s")
"""Of the report, those to be shown."""


class Pair(NamedTuple):
    """One round of a case."""

    ours: Timed
    plain: Timed


def figures_of(rounds: Mapping[Case, Sequence[Pair]]) -> dict[str, Any]:
    """The ratios of the cases that were run, null for the others, and a row for each case."""
    figures: dict[str, Any] = {}
    by_name = {case.name: pairs for case, pairs in rounds.items() if pairs}
    for name in DECODED:
        ratios = [pair.plain.decode_s / pair.ours.decode_s for pair in by_name.get(name, ())]
        figures |= _ratio(f"decode_ratio_{name}", ratios)
    prefills = [p.plain.prefill_s / p.ours.prefill_s for p in by_name.get("prefill", ())]
    figures |= _ratio("prefill_ratio", prefills)
    figures["rows"] = [_row(case, pairs) for case, pairs in rounds.items() if pairs]
    return figures


def same_tokens(pair: Pair) -> int:
    """How many prompts have the same new tokens on both sides."""
    return sum(
        list(ours) == list(plain)
        for ours, plain in zip(pair.ours.tokens, pair.plain.tokens, strict=True)
    )


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    if not ratios:
        return {name: None}
    made = estimate(ratios)
    return {name: made.median, f"{name}_interval": [made.low, made.high]}


def _row(case: Case, pairs: Sequence[Pair]) -> dict[str, Any]:
    sides = {"ours": [pair.ours for pair in pairs], "generate": [pair.plain for pair in pairs]}
    row: dict[str, Any] = {
        "case": case.name,
        "prompts": list(case.lengths),
        "new_tokens": case.new_tokens,
        "rounds": len(pairs),
        "prefill_tokens_per_s": {
            side: sum(case.lengths) / statistics.median(run.prefill_s for run in runs)
            for side, runs in sides.items()
        },
        "same_tokens": [min(same_tokens(pair) for pair in pairs), len(case.lengths)],
    }
    if case.steps:
        row["decode_tokens_per_s"] = {
            side: len(case.lengths) * case.steps / statistics.median(run.decode_s for run in runs)
            for side, runs in sides.items()
        }
    return row
