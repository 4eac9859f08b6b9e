"""Cases quote their rules: a rule that the protocol's reference does not state is nobody's duty."""

from __future__ import annotations

import re
from itertools import groupby
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


def passages() -> list[str]:
    """Every comment of the protos, and every `when` of the status table, each in one line."""
    found = [row.when for row in STATUS_TABLE.values()]
    for proto in sorted(PROTOS.glob("*.proto")):
        lines = [line.strip() for line in proto.read_text(encoding="utf-8").splitlines()]
        for commented, block in groupby(lines, lambda line: line.startswith("//")):
            if commented:
                words = " ".join(line.removeprefix("//") for line in block).split()
                found.append(" ".join(words))
    return found


def stands_whole(rule: str, passage: str) -> bool:
    """Whether a rule is in a passage, from the beginning of a clause to the end of one: clauses
    end with a full stop, a semicolon, a colon, or the passage."""
    return bool(re.search(rf"(?:^|[.;:] ){re.escape(rule)}(?:(?<=[.;:])|$|[.;:](?: |$))", passage))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_the_rule_stands_in_the_reference_in_whole_clauses(case: Case[Any]) -> None:
    assert any(stands_whole(case.rule, passage) for passage in passages())


@pytest.mark.parametrize(
    ("rule", "whole"),
    [
        ("It is heard of at once.", True),
        ("It is heard of at once", True),
        ("none is lost", True),
        ("heard of at once", False),
        ("none is", False),
        ("It is heard of at once. Of", False),
        ("It is found.", False),
    ],
)
def test_a_part_of_a_clause_is_no_rule(rule: str, whole: bool) -> None:
    passage = "A loss is told. It is heard of at once. Of several: none is lost; all are told."
    assert stands_whole(rule, passage) is whole


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_a_case_says_what_it_does(case: Case[Any]) -> None:
    assert re.fullmatch(r"[A-Z].*\.", case.title)
