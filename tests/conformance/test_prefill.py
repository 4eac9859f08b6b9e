"""The kit judges our own P: it passes whole, and each planted fault is found."""

from __future__ import annotations

import pytest

from pd_grpc.conformance.prefill import PREFILL_CASES, open_prefill
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import run_case, run_cases
from tests.conformance.mutants.judging import assert_found
from tests.conformance.mutants.prefill import PREFILL_MUTANTS
from tests.conformance.mutants.registry import Mutant
from tests.conformance.subjects import TRIES, prefill_server


@pytest.mark.longest
@pytest.mark.timeout(600)
async def test_our_prefill_passes_whole() -> None:
    async with prefill_server() as p:
        async with open_prefill(p.endpoint) as subject:
            results = await run_cases(subject, PREFILL_CASES, tries=TRIES)
        p.pool.check()
    assert not [explained(r) for r in results if r.passed is False]
    too_fast = [r.id for r in results if r.passed is None]
    assert too_fast == ["P608"], "every other case applies to our own P"


async def test_our_prefill_is_seen_to_stop_computing() -> None:
    async with prefill_server(sim_time_scale=40.0) as p, open_prefill(p.endpoint) as subject:
        result = await run_case(subject, PREFILL_CASES["P608"], TRIES)
    assert result.passed, explained(result)


@pytest.mark.planted
@pytest.mark.parametrize(("case_id", "mutant"), PREFILL_MUTANTS.params())
async def test_a_planted_fault_is_found(
    case_id: str,
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutant.plant(monkeypatch)
    async with prefill_server(**mutant.settings) as p, open_prefill(p.endpoint) as subject:
        await assert_found(subject, PREFILL_CASES[case_id], mutant, caplog)
