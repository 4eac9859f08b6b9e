"""The kit judges a D of another kind than our own: a model whose answers nobody knows, a pool of
few blocks, a length that is not told. Where it is right nothing fails, and little does not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pd_grpc.conformance import kv
from pd_grpc.conformance.case import Case, answers_within, soon_s
from pd_grpc.conformance.decode import DECODE_CASES, open_decode
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import Result, run_cases
from tests.conformance.subjects import TRIES, decode_server

ABOUT_TOKENS = ["D305", "D320", "D460", "D461", "D462", "D463", "D464", "D466", "D611"]
"""What can only be seen in the right tokens."""

WITH_HAND_OVERS = [
    *("D213", "D216", "D230", "D250", "D301", "D303", "D304", "D319", "D324", "D332", "D350"),
    *("D352", "D401", "D403", "D405", "D412", "D440", "D445", "D465", "D467", "D469", "D512"),
    *("D541", "D601", "D604", "D607", "D610", "D612", "D645", "D651", "D705", "D802", "D804"),
]
"""Cases that bring an answer to its end, and take little time."""

MANY_BLOCKS = ["D244", "D324", "D610", "D902", "D903"]
"""Cases that need more than five blocks."""

NOT_TOLD = ["D129", "D211", "D240", "D253", "D625", "D660"]
"""Cases that use the room there is for one request."""


async def judged(only: Iterable[str] = (), **settings: Any) -> list[Result]:
    """What the kit says of our D with these settings; `only` these cases, or all of them."""
    wanted = [*only]
    cases: list[Case[Any]] = [c for c in DECODE_CASES if not wanted or c.id in wanted]
    async with decode_server(**settings) as d, open_decode(d.endpoint) as subject:
        results = await run_cases(subject, cases, tries=TRIES)
    assert not [explained(r) for r in results if r.passed is False]
    return results


def not_applicable(results: Iterable[Result]) -> list[str]:
    """The cases that did not apply."""
    return [result.id for result in results if result.passed is None]


@pytest.fixture
def unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit, and the kit alone, does not know the model of D."""
    monkeypatch.setattr(kv, "_sim_config", lambda layout: None)


@pytest.mark.usefixtures("unknown_model")
async def test_hand_overs_of_an_unknown_model_are_judged() -> None:
    results = await judged([*WITH_HAND_OVERS, *ABOUT_TOKENS])
    assert not_applicable(results) == ABOUT_TOKENS


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("unknown_model")
async def test_only_cases_about_tokens_do_not_apply_to_an_unknown_model() -> None:
    assert not_applicable(await judged()) == ABOUT_TOKENS


LAYOUT_CASES = [f"D{number}" for number in (*range(130, 138), 142, 143, 144)]


@pytest.mark.parametrize("layout", ["fp8-scale", "sliding", "sliding-fp8-scale"])
async def test_other_layouts_are_judged_to_the_last_token(layout: str) -> None:
    """Their Hello, KV that a stock P sends of them, and the answers that come of it."""
    settings = {"sim_layout": layout, "sim_window": 20}
    results = await judged([*LAYOUT_CASES, *WITH_HAND_OVERS, *ABOUT_TOKENS], **settings)
    assert not_applicable(results) == []


async def test_a_packing_of_its_own_is_judged_by_canonical_bytes() -> None:
    results = await judged([*LAYOUT_CASES, *WITH_HAND_OVERS], sim_format="token-major")
    assert not_applicable(results) == []


async def test_a_small_pool_is_told_how_many_blocks_a_case_needs() -> None:
    results = await judged(MANY_BLOCKS, num_blocks=5)
    assert not_applicable(results) == MANY_BLOCKS
    assert results[0].explanation == "does not apply: the case needs 6 blocks; D has 5"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("blocks", [5, 3])
async def test_nothing_fails_for_a_small_pool(blocks: int) -> None:
    results = await judged(num_blocks=blocks)
    assert {*MANY_BLOCKS} <= {*not_applicable(results)}


async def test_a_length_that_is_not_told_is_no_length() -> None:
    cases = [DECODE_CASES[case_id] for case_id in [*NOT_TOLD, "D210", "D661"]]
    async with decode_server() as d, open_decode(d.endpoint) as subject:
        subject.info.max_model_len = 0
        assert subject.room_tokens == 64 * 16
        results = await run_cases(subject, cases, tries=TRIES)
    assert not [explained(r) for r in results if r.passed is False]
    assert not_applicable(results) == ["D210", "D661"]


async def test_budgets_that_end_soon_grow_with_the_time_for_an_answer() -> None:
    answers_within(60.0)
    assert soon_s() == 6.0
