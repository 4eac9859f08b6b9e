"""How long the steps of a model take, for an engine that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MIXED = 1.1


@dataclass(frozen=True)
class StepTable:
    """Step times measured at a few sizes, straight lines between them and beyond the last.

    `prefill` is (tokens in the step, ms), `decode` (requests in the step, ms) with empty contexts;
    both start at 1 and rise in their first column. `decode_context_ms` is what each token of
    context, summed over the batch, adds to a decode step. ValueError when a table is none.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, float], ...]
    decode_context_ms: float

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            points = getattr(self, name)
            sizes = [size for size, _ in points]
            if len(sizes) < 2 or sizes[0] != 1 or sizes != sorted(set(sizes)):
                raise ValueError(f"{name}: needs two or more sizes that rise from 1, not {sizes}")
            if any(ms < 0 for _, ms in points):
                raise ValueError(f"{name}: a step takes no negative time")
        if self.decode_context_ms < 0:
            raise ValueError("decode_context_ms: a step takes no negative time")

    def prefill_ms(self, tokens: int) -> float:
        """Time of a prefill step of `tokens` tokens, all its chunks together."""
        return _at(self.prefill, tokens)

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """Time of a decode step of `batch` requests with `context_tokens` in their contexts."""
        return _at(self.decode, batch) + context_tokens * self.decode_context_ms

    def mixed_ms(self, tokens: int, batch: int, context_tokens: int) -> float:
        """Time of one pass that computes `tokens` tokens of prompts beside a decode step.

        As `splitwise-sim` has it (`get_iteration_duration` in its performance_model.py): a prefill
        step of all its tokens, and a tenth more; but no less than the decode step alone.
        """
        if not tokens:
            return self.decode_ms(batch, context_tokens)
        if not batch:
            return self.prefill_ms(tokens)
        pass_ms = _MIXED * self.prefill_ms(tokens + batch)
        return max(pass_ms, self.decode_ms(batch, context_tokens))


def _at(points: Sequence[tuple[int, float]], size: int) -> float:
    if size <= 0:
        return 0.0
    after = next((i for i, (x, _) in enumerate(points) if x >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(after, 1) - 1], points[max(after, 1)]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


INVENTED_STEPS = StepTable(
    prefill=((1, 6.0), (128, 7.0), (512, 12.0), (2048, 40.0), (8192, 160.0)),
    decode=((1, 5.0), (8, 5.5), (32, 7.0), (128, 12.0), (256, 19.0)),
    decode_context_ms=2e-5,
)
"""Not measured anywhere: invented to have the shape of a small model on one accelerator, a floor of
launch time, then prefill linear in its tokens, decode slow to grow with its batch."""
