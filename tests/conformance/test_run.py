"""A run gives a verdict on every case, whatever goes wrong in one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from google.rpc import status_pb2

from pd_grpc.conformance.case import Broken, Cases, expect, parsed
from pd_grpc.conformance.report import as_object, as_table, explained, unsteady
from pd_grpc.conformance.run import DID_NOT_END, KIT_FAILED, run_cases
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.messages import layout_from_proto
from pd_grpc.v1 import layout_pb2

KIND_77 = b"\x08\x4d"
"""A group of a kind of a later version."""


class Nobody:
    """A subject that no case asks anything."""

    patience_s = 0.05

    @contextlib.asynccontextmanager
    async def case(self, case_id: str, transcript: Transcript) -> AsyncIterator[None]:
        yield


async def test_a_mistake_of_the_kits_fails_its_case_alone() -> None:
    cases: Cases[None] = Cases("X")

    @cases(1, "A rule.")
    async def one_that_is_wrong_itself(hand: None) -> None:
        """Something is looked up that is not there."""
        raise SystemError("negative length")

    @cases(2, "A rule.")
    async def one_that_is_right(hand: None) -> None:
        """Nothing is done."""

    wrong, right = await run_cases(Nobody(), cases)

    assert wrong.passed is False
    assert wrong.explanation.startswith(KIT_FAILED)
    assert "one_that_is_wrong_itself" in wrong.explanation
    assert "SystemError: negative length" in wrong.explanation
    assert right.passed is True


async def test_a_case_that_does_not_end_is_ended() -> None:
    cases: Cases[None] = Cases("X")

    @cases(1, "A rule.")
    async def without_end(hand: None) -> None:
        """Waits for what never comes."""
        await asyncio.Event().wait()

    (result,) = await run_cases(Nobody(), cases)

    assert result.passed is False
    assert result.explanation.startswith(DID_NOT_END)


def failing_first(failures: int) -> Cases[None]:
    cases: Cases[None] = Cases("X")
    left = iter(range(failures, -1, -1))

    @cases(1, "A rule.")
    async def at_first(hand: None) -> None:
        """Fails a few times."""
        expect((number := next(left)) == 0, "no failure", number)

    return cases


async def test_a_case_that_fails_is_tried_again_and_tells_of_it() -> None:
    (result,) = await run_cases(Nobody(), failing_first(2), tries=3)
    assert result.passed is True
    assert result.failed_before == [f"expected no failure; got {n}" for n in (2, 1)]
    assert unsteady([result]) == ["X001 passed at try 3; before: expected no failure; got 1"]
    assert as_object({}, [result])["cases"][0]["failed_before"] == result.failed_before
    assert [*as_table([result]).columns[1].cells] == ["[green]passed[/], try 3"]


@pytest.mark.parametrize(("tries", "before"), [(1, 0), (2, 1)])
async def test_a_case_that_fails_at_its_last_try_has_failed(tries: int, before: int) -> None:
    (result,) = await run_cases(Nobody(), failing_first(2), tries=tries)
    assert result.passed is False and len(result.failed_before) == before
    assert unsteady([result]) == []
    assert explained(result).count("before: expected no failure; got 2") == before


def test_what_cannot_be_read_is_the_subjects_fault() -> None:
    with pytest.raises(Broken, match="details that can be used"):
        parsed(status_pb2.Status.FromString, b"\xff", "details")
    layout = layout_pb2.KvLayout(groups=[layout_pb2.KvGroup.FromString(KIND_77)])
    with pytest.raises(Broken, match=r"groups\[0\]"):
        parsed(layout_from_proto, layout, "the layout")
