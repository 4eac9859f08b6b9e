"""The planted faults that `make test` does not look for can still be planted."""

from __future__ import annotations

import pytest

from tests.conformance.mutants.decode import DECODE_MUTANTS
from tests.conformance.mutants.prefill import PREFILL_MUTANTS
from tests.conformance.mutants.registry import SHARE, Mutants
from tests.conformance.mutants.router import ROUTER_MUTANTS

ALL = [DECODE_MUTANTS, PREFILL_MUTANTS, ROUTER_MUTANTS]


@pytest.mark.parametrize("mutants", ALL, ids=["decode", "prefill", "router"])
def test_what_a_fault_replaces_is_there(mutants: Mutants) -> None:
    for of_case in mutants.by_case.values():
        for mutant in of_case:
            with pytest.MonkeyPatch.context() as patch:
                mutant.plant(patch)


@pytest.mark.parametrize("mutants", ALL, ids=["decode", "prefill", "router"])
def test_about_a_share_is_looked_for(mutants: Mutants) -> None:
    params = mutants.params()
    kept = [param for param in params if not param.marks]
    assert 0.5 / SHARE < len(kept) / len(params) < 2 / SHARE
