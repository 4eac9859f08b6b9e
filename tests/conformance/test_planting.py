"""Every case has planted faults, and those beyond the share of `make test` can still be planted."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.decode import DECODE_CASES
from pd_grpc.conformance.prefill import PREFILL_CASES
from pd_grpc.conformance.router import ROUTER_CASES
from tests.conformance.mutants.decode import DECODE_MUTANTS
from tests.conformance.mutants.prefill import PREFILL_MUTANTS
from tests.conformance.mutants.registry import SHARE, Mutants
from tests.conformance.mutants.router import ROUTER_MUTANTS

ALL: dict[str, tuple[Cases[Any], Mutants]] = {
    "decode": (DECODE_CASES, DECODE_MUTANTS),
    "prefill": (PREFILL_CASES, PREFILL_MUTANTS),
    "router": (ROUTER_CASES, ROUTER_MUTANTS),
}


@pytest.mark.parametrize("role", ALL)
def test_every_case_has_a_mutant(role: str) -> None:
    cases, mutants = ALL[role]
    assert [case.id for case in cases] == sorted(mutants.by_case)


@pytest.mark.parametrize("role", ALL)
def test_what_a_fault_replaces_is_there(role: str) -> None:
    _, mutants = ALL[role]
    for of_case in mutants.by_case.values():
        for mutant in of_case:
            with pytest.MonkeyPatch.context() as patch:
                mutant.plant(patch)


@pytest.mark.parametrize("role", ALL)
def test_about_a_share_is_looked_for(role: str) -> None:
    _, mutants = ALL[role]
    params = mutants.params()
    kept = [param for param in params if not param.marks]
    assert 0.5 / SHARE < len(kept) / len(params) < 2 / SHARE
