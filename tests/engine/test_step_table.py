"""Step times: exact at the points given, straight lines elsewhere."""

from __future__ import annotations

import pytest

from pd_grpc.engine.step_table import INVENTED_STEPS, StepTable

TABLE = StepTable(
    prefill=((1, 2.0), (11, 12.0), (31, 92.0)), decode=((1, 4.0), (5, 6.0)), decode_context_ms=0.5
)


@pytest.mark.parametrize(
    ("tokens", "ms"), [(0, 0), (1, 2), (6, 7), (11, 12), (21, 52), (31, 92), (41, 132)]
)
def test_prefill_time_runs_through_the_points_and_beyond(tokens: int, ms: float) -> None:
    assert TABLE.prefill_ms(tokens) == pytest.approx(ms)


def test_decode_time_grows_with_the_batch_and_with_its_context() -> None:
    assert TABLE.decode_ms(0, 0) == 0
    assert TABLE.decode_ms(1, 0) == 4
    assert TABLE.decode_ms(3, 10) == pytest.approx(5 + 5)
    assert TABLE.decode_ms(9, 0) == pytest.approx(8)


def test_a_step_of_both_is_one_pass_over_all_its_tokens_and_a_tenth() -> None:
    assert TABLE.mixed_ms(9, 2, 0) == pytest.approx(1.1 * TABLE.prefill_ms(11))
    assert TABLE.mixed_ms(1, 4, 100) == TABLE.decode_ms(4, 100), "no less than the decode alone"
    assert TABLE.mixed_ms(7, 0, 0) == TABLE.prefill_ms(7)
    assert TABLE.mixed_ms(0, 3, 10) == TABLE.decode_ms(3, 10)


def test_the_invented_times_rise_with_the_size_of_the_step() -> None:
    prefill = [INVENTED_STEPS.prefill_ms(tokens) for tokens in range(1, 20_000, 37)]
    decode = [INVENTED_STEPS.decode_ms(batch, batch * 1000) for batch in range(1, 600)]
    assert prefill == sorted(prefill) and prefill[0] > 0
    assert decode == sorted(decode) and decode[0] > 0


@pytest.mark.parametrize(
    ("prefill", "decode", "context", "field"),
    [
        (((1, 1.0),), ((1, 1.0), (2, 1.0)), 0, "prefill"),
        (((1, 1.0), (2, 1.0)), ((2, 1.0), (3, 1.0)), 0, "decode"),
        (((1, 1.0), (3, 1.0), (2, 1.0)), ((1, 1.0), (2, 1.0)), 0, "prefill"),
        (((1, 1.0), (2, -1.0)), ((1, 1.0), (2, 1.0)), 0, "prefill"),
        (((1, 1.0), (2, 1.0)), ((1, 1.0), (2, 1.0)), -1, "decode_context_ms"),
    ],
)
def test_a_table_that_is_none_is_refused(
    prefill: tuple[tuple[int, float], ...],
    decode: tuple[tuple[int, float], ...],
    context: float,
    field: str,
) -> None:
    with pytest.raises(ValueError, match=field):
        StepTable(prefill, decode, context)
