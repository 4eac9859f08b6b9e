"""The pages about the kit name every case, and none that does not exist."""

from __future__ import annotations

import re
from collections import Counter

from pd_grpc.conformance.decode import DECODE_CASES
from pd_grpc.conformance.prefill import PREFILL_CASES
from pd_grpc.conformance.router import ROUTER_CASES
from tests.house.pages import ROOT

IDS = [case.id for cases in (DECODE_CASES, PREFILL_CASES, ROUTER_CASES) for case in cases]
DOCS = ROOT / "docs"


def test_the_way_to_the_other_side_leads_past_every_case_once() -> None:
    text = " ".join((DOCS / "implementing.md").read_text(encoding="utf-8").split())
    passed: Counter[str] = Counter()
    for green in re.findall(r"Green: ([^.]+)\.", text):
        for first, last in re.findall(r"([DPR]\d{3})(?: to ([DPR]\d{3}))?", green):
            assert {first, last or first} <= set(IDS), f"{first} to {last}"
            passed.update(c for c in IDS if first <= c <= (last or first))
    assert [c for c in IDS if passed[c] != 1] == []


def test_the_decisions_are_proven_by_cases_that_exist() -> None:
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[DPR]\d{3}\b", text))
    assert len(named) >= 30
    assert named <= set(IDS)
