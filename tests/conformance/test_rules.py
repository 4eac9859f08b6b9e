"""Cases quote their rules: a rule that the protocol's reference does not state is nobody's duty."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.conformance.case import Case
from pd_grpc.conformance.decode import DECODE_CASES
from pd_grpc.conformance.prefill import PREFILL_CASES
from pd_grpc.conformance.router import ROUTER_CASES
from pd_grpc.protocol.faults import STATUS_TABLE

PROTOS = Path(__file__).parents[2] / "protos" / "pd_grpc" / "v1"
CASES: list[Case[Any]] = [*DECODE_CASES, *PREFILL_CASES, *ROUTER_CASES]


def reference() -> str:
    """What the comments of the protos and the status table say, in one line."""
    comments = [
        line.strip().removeprefix("//")
        for proto in sorted(PROTOS.glob("*.proto"))
        for line in proto.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("//")
    ]
    return " ".join(" ".join([*comments, *(row.when for row in STATUS_TABLE.values())]).split())


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_the_rule_stands_in_the_reference_word_for_word(case: Case[Any]) -> None:
    assert case.rule in reference()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_a_case_says_what_it_does(case: Case[Any]) -> None:
    assert re.fullmatch(r"[A-Z].*\.", case.title)
