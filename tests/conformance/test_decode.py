"""The kit judges our own D: it passes whole, and each planted fault is found."""

from __future__ import annotations

import pytest

from pd_grpc.conformance.decode import DECODE_CASES, open_decode
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import run_cases
from tests.conformance.mutants.decode import DECODE_MUTANTS
from tests.conformance.mutants.judging import assert_found
from tests.conformance.mutants.registry import Mutant
from tests.conformance.subjects import TRIES, decode_server


@pytest.mark.longest
@pytest.mark.timeout(600)
async def test_our_decode_passes_whole() -> None:
    async with decode_server() as d:
        async with open_decode(d.endpoint) as subject:
            results = await run_cases(subject, DECODE_CASES, tries=TRIES)
        d.pool.check()
    assert not [explained(r) for r in results if r.passed is False]
    assert not [r.id for r in results if r.passed is None], "every case applies to our own D"


@pytest.mark.planted
@pytest.mark.parametrize(("case_id", "mutant"), DECODE_MUTANTS.params())
async def test_a_planted_fault_is_found(
    case_id: str,
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutant.plant(monkeypatch)
    async with decode_server(**mutant.settings) as d, open_decode(d.endpoint) as subject:
        await assert_found(subject, DECODE_CASES[case_id], mutant, caplog)
