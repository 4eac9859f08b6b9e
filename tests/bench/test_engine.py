"""The benchmark of the torch engine: both sides say the same, and a ratio is theirs over ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("psutil")

import torch
from transformers import LlamaConfig

from pd_grpc.bench.engine.cases import MIXED_LENGTHS, Case, Timed, cases_of
from pd_grpc.bench.engine.figures import FIGURES, Pair, figures_of, same_tokens
from pd_grpc.bench.engine.ours import run_ours
from pd_grpc.bench.engine.run import EngineScope, bench_engine, faults_of
from pd_grpc.engine import plain_generate
from pd_grpc.engine.base import DecodeSlot, Sampled
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.plain_generate import PlainGenerate
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.config import EngineConfig
from tests.engine.torch_models import SIZES, load_tiny, save_model

RATIOS = [name for name in FIGURES if "ratio" in name]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 1100})
    return save_model(tmp_path_factory.mktemp("bench") / "tiny", config)


def tiny_scope(folder: Path) -> EngineScope:
    quick = EngineScope.of(quick=True)
    return replace(quick, rounds=2, model=str(folder), dtype="float32", threads=1)


def told(scope: EngineScope) -> tuple[dict[str, Any], list[str]]:
    stages: list[str] = []
    report = asyncio.run(bench_engine(scope, stages.append))
    return report, stages


def test_both_sides_say_the_same_and_every_figure_is_there(folder: Path) -> None:
    report, stages = told(tiny_scope(folder))

    assert not faults_of(report)
    for row in report["rows"]:
        assert row["same_tokens"] == [len(row["prompts"])] * 2
        assert row["rounds"] == 2
    assert all(report[name] > 0 for name in RATIOS)
    assert set(report["targets_met"]) == set(RATIOS)
    assert (report["dtype"], report["threads"], report["model"]) == ("float32", 1, "tiny")
    assert {"torch", "transformers"} <= set(report["versions"])
    assert stages[-1] == "round 2 of 2, prefill"
    json.dumps(report)


def test_a_token_that_differs_in_float32_is_a_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchEngine.decode

    def wrong(engine: TorchEngine, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        first, *rest = right(engine, batch)
        return [Sampled((first.token_id + 1) % SIZES["vocab_size"]), *rest]

    monkeypatch.setattr(TorchEngine, "decode", wrong)
    report, _ = told(tiny_scope(folder))

    # One prompt of each of the four cases that decode, in each of two rounds.
    assert faults_of(report) == ["8 answers are not those of generate"]


def test_other_weights_on_the_other_side_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = PlainGenerate(str(folder), "bfloat16")
    monkeypatch.setattr(plain_generate, "PlainGenerate", lambda model, dtype: half)

    with pytest.raises(ModelError, match="not loaded alike"):
        told(tiny_scope(folder))


def test_a_prompt_longer_than_a_step_is_cut_and_short_ones_share_a_step(folder: Path) -> None:
    engine = load_tiny(folder, num_blocks=32)
    case = Case("cut", (3, 70, 5, 5), 3)

    whole = run_ours(engine, case, EngineConfig(chunk_tokens=128, prefill_batch=8))
    cut = run_ours(engine, case, EngineConfig(chunk_tokens=32, prefill_batch=2))

    assert cut.tokens == whole.tokens
    assert [len(tokens) for tokens in cut.tokens] == [3, 3, 3, 3]


def test_the_lengths_of_mixed_prompts_are_those_of_every_run() -> None:
    mixed, again = ({c.name: c for c in cases_of(new_tokens=8)}["mixed"] for _ in range(2))
    assert mixed == again
    assert len(mixed.lengths) == 16 and len(set(mixed.lengths)) > 10
    assert MIXED_LENGTHS[0] <= min(mixed.lengths) and max(mixed.lengths) <= MIXED_LENGTHS[1]
    assert mixed.prompts(300) == again.prompts(300)


def test_a_ratio_is_the_median_of_rounds_of_their_time_over_ours() -> None:
    case = Case("b1", (32,), 11)
    pairs = [Pair(Timed(9, 2.0, [[1]]), Timed(9, theirs, [[1]])) for theirs in (2.0, 3.0, 9.0)]

    figures = figures_of({case: pairs})

    assert figures["decode_ratio_b1"] == 1.5
    assert figures["decode_ratio_b1_interval"] == [1.0, 4.5]
    assert figures["decode_ratio_b4"] is None
    (row,) = figures["rows"]
    assert row["decode_tokens_per_s"] == {"ours": 5.0, "generate": pytest.approx(10 / 3)}


def test_prompts_whose_tokens_differ_anywhere_do_not_count_as_the_same() -> None:
    ours = Timed(1, 1, [[1, 2], [3, 4], [5, 6]])
    assert same_tokens(Pair(ours, Timed(1, 1, [[1, 2], [3, 9], [5, 6]]))) == 2
