from __future__ import annotations

from pathlib import Path

import pytest

from pd_grpc.engine.splitwise_steps import SPLITWISE, NoMeasurements, read_splitwise

HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
# 512 tokens are the prompts of every batch; context costs 0.01 ms a token.
RUNS = [
    (512, 1, 50.0, 25.12),
    (512, 1, 54.0, 25.12),
    (512, 1, 52.0, 25.12),
    (1024, 1, 80.0, 30.24),
    (512, 2, 79.0, 30.24),
    (512, 4, 130.0, 45.48),
]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "perf_model.csv"
    rows = [f"m,h,{p},{b},128,{prompt},{token},8" for p, b, prompt, token in RUNS]
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_prompts_are_taken_by_the_tokens_of_the_step_and_by_their_median(measured: Path) -> None:
    steps = read_splitwise(measured, "m", "h", 8)
    assert steps.prefill == ((1, 52.0), (512, 52.0), (1024, 79.5), (2048, 130.0))


def test_a_step_of_decode_is_split_into_its_batch_and_its_context(measured: Path) -> None:
    steps = read_splitwise(measured, "m", "h", 8)
    assert steps.decode_context_ms == pytest.approx(0.01)
    assert steps.decode == ((1, 20.0), (2, 20.0), (4, 25.0))
    assert steps.decode_ms(4, 4 * 512) == pytest.approx(45.48)


def test_a_model_that_was_not_measured_is_refused_with_those_that_were(measured: Path) -> None:
    with pytest.raises(NoMeasurements, match="no runs of m/h/4; there are m/h/8"):
        read_splitwise(measured, "m", "h", 4)


def test_another_file_is_refused_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(NoMeasurements, match="has not the columns model, hardware"):
        read_splitwise(path, "m", "h", 8)


@pytest.mark.parametrize("name", SPLITWISE)
def test_the_tables_in_use_rise_with_their_sizes(name: str) -> None:
    steps = SPLITWISE[name]
    for points in (steps.prefill, steps.decode):
        times = [ms for _, ms in points]
        assert times == sorted(times)
    assert steps.decode_ms(64, 64 * 512) > steps.decode_ms(1, 512)
