"""Writes docs/conformance.md: every case of the conformance kit, part of `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.decode import DECODE_CASES
from pd_grpc.conformance.prefill import PREFILL_CASES
from pd_grpc.conformance.router import ROUTER_CASES
from tools.marked_parts import table, with_parts

PAGE = Path(__file__).parent.parent / "docs" / "conformance.md"


def cases_of(cases: Cases[Any]) -> str:
    """Every case: number, the rule it quotes, what it does."""
    rows = [(case.id, case.rule, case.title) for case in cases]
    return table("case | rule | what the kit does", rows)


TABLES: dict[str, Callable[[], str]] = {
    "decode_cases": lambda: cases_of(DECODE_CASES),
    "prefill_cases": lambda: cases_of(PREFILL_CASES),
    "router_cases": lambda: cases_of(ROUTER_CASES),
}


def main() -> int:
    """Rewrite the page in place."""
    PAGE.write_text(with_parts(PAGE.read_text(), TABLES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
