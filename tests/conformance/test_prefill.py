"""The kit judges our own P: it passes whole, and each planted fault is found."""

from __future__ import annotations

import pytest

from pd_grpc.conformance.case import answers_within
from pd_grpc.conformance.prefill import PREFILL_CASES, open_prefill
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import run_case, run_cases
from tests.conformance.mutants.prefill import PREFILL_MUTANTS
from tests.conformance.mutants.registry import Mutant
from tests.conformance.subjects import prefill_server

IMPATIENT_S = 1.0
"""How long a faulty server may leave the kit waiting."""


@pytest.mark.timeout(180)
async def test_our_prefill_passes_whole() -> None:
    async with prefill_server() as p:
        async with open_prefill(p.endpoint) as subject:
            results = await run_cases(subject, PREFILL_CASES)
        p.pool.check()
    assert not [explained(r) for r in results if r.passed is False]
    assert not [r.id for r in results if r.passed is None], "every case applies to our own P"


def test_every_case_has_a_mutant() -> None:
    assert [case.id for case in PREFILL_CASES] == sorted(PREFILL_MUTANTS.by_case)


@pytest.mark.parametrize(("case_id", "mutant"), PREFILL_MUTANTS.params())
async def test_a_planted_fault_is_found(
    case_id: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    answers_within(IMPATIENT_S)
    async with prefill_server(**mutant.settings) as p, open_prefill(p.endpoint) as subject:
        result = await run_case(subject, PREFILL_CASES[case_id])
    assert result.passed is False, f"{mutant.name} survived {case_id}"
