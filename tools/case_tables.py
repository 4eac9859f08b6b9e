"""The parts of docs/conformance.md: every case of the conformance kit."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.decode import DECODE_CASES
from pd_grpc.conformance.prefill import PREFILL_CASES
from pd_grpc.conformance.router import ROUTER_CASES
from tools.marked_parts import Parts, table


def cases_of(cases: Cases[Any]) -> str:
    """Every case: number, the rule it quotes, what it does."""
    rows = [(case.id, case.rule, case.title) for case in cases]
    return table("case | rule | what the kit does", rows)


TABLES: Parts = {
    "decode_cases": lambda: cases_of(DECODE_CASES),
    "prefill_cases": lambda: cases_of(PREFILL_CASES),
    "router_cases": lambda: cases_of(ROUTER_CASES),
}
