"""The kit is fair to a P that is right and unlike ours: a case that asks more than P has does not
apply, and none fails for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pd_grpc.conformance.case import answers_within
from pd_grpc.conformance.prefill import PREFILL_CASES, PrefillSubject, open_prefill
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import run_cases
from tests.conformance.subjects import TRIES, prefill_server


async def not_applicable(subject: PrefillSubject, case_ids: Sequence[str]) -> list[str]:
    """Which of the cases do not apply; the others must pass."""
    results = await run_cases(
        subject, [PREFILL_CASES[case_id] for case_id in case_ids], tries=TRIES
    )
    assert not [explained(r) for r in results if r.passed is False]
    return [r.id for r in results if r.passed is None]


@pytest.mark.parametrize(
    ("settings", "case_ids", "wanted"),
    [
        pytest.param(
            {"num_blocks": 4},
            ["P226", "P303", "P308", "P402", "P421", "P501", "P605", "P806"],
            ["P303", "P308", "P402", "P421"],
            id="a small pool",
        ),
        pytest.param(
            {"num_blocks": 256, "max_model_len": 600},
            ["P226", "P605", "P711", "P806"],
            ["P806"],
            id="a pool larger than the model",
        ),
        pytest.param(
            {"num_blocks": 4096, "max_model_len": 600},
            ["P226", "P605"],
            ["P226", "P605"],
            id="a pool that takes many prompts to fill",
        ),
        pytest.param(
            {"sim_vocab": 300},
            ["P201", "P202", "P203", "P206", "P304", "P402", "P424", "P702", "P712", "P805"],
            [],
            id="a small vocabulary",
        ),
    ],
)
async def test_sizes(settings: dict[str, Any], case_ids: list[str], wanted: list[str]) -> None:
    async with prefill_server(**settings) as p, open_prefill(p.endpoint) as subject:
        assert await not_applicable(subject, case_ids) == wanted


@pytest.mark.parametrize("layout", ["fp8-scale", "sliding", "sliding-fp8-scale"])
async def test_layouts(layout: str) -> None:
    """Every byte of every group and plane is looked at, and it all counts in windows and sums."""
    settings = {"sim_layout": layout, "sim_window": 20}
    async with prefill_server(**settings) as p, open_prefill(p.endpoint) as subject:
        assert subject.rule.is_sim
        kv = [f"P{number}" for number in range(301, 317)]
        found = await not_applicable(subject, [*kv, "P115", "P401", "P402", "P425"])
    assert found == []


async def test_one_that_does_not_tell_its_limits() -> None:
    async with prefill_server() as p, open_prefill(p.endpoint) as subject:
        subject.info.max_model_len = subject.info.vocab_size = 0
        found = await not_applicable(subject, ["P226", "P402", "P702", "P711", "P805", "P806"])
    assert found == ["P702", "P711", "P806"]


async def test_one_that_is_slow_where_the_kit_is_told_to_be_patient() -> None:
    answers_within(10.0)
    async with prefill_server(sim_time_scale=60.0) as p, open_prefill(p.endpoint) as subject:
        assert await not_applicable(subject, ["P506", "P512"]) == []
