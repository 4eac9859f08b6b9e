"""A planted fault counts as found only where its case fails by the rule."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from pd_grpc.conformance.case import Broken, Cases
from pd_grpc.conformance.run import DID_NOT_END, KIT_FAILED
from pd_grpc.conformance.transcript import Transcript
from tests.conformance.mutants.judging import assert_found
from tests.conformance.mutants.registry import Mutant

NOTHING: dict[str, str] = {}
MUTANT = Mutant("a_fault", lambda patch: None)


class Nobody:
    """A subject that no case asks anything."""

    patience_s = 0.05

    @contextlib.asynccontextmanager
    async def case(self, case_id: str, transcript: Transcript) -> AsyncIterator[None]:
        yield


async def passes(hand: None) -> None:
    """Finds nothing."""


async def fails(hand: None) -> None:
    """Finds the rule broken."""
    raise Broken("expected this; got that")


async def fails_beside_a_crash(hand: None) -> None:
    """Finds the rule broken, for the server has crashed."""
    try:
        print(NOTHING["a grant"])
    except KeyError:
        logging.getLogger("pd_grpc.decode").exception("a handler failed")
    raise Broken("expected this; got that")


async def fails_as_a_peer_leaves(hand: None) -> None:
    """Finds the rule broken, while grpc writes to a call that is over."""
    try:
        raise cygrpc.ExecuteBatchError("the call is over")
    except cygrpc.ExecuteBatchError:
        logging.getLogger("grpc").exception("a handler failed")
    raise Broken("expected this; got that")


async def is_wrong_itself(hand: None) -> None:
    """Looks up what is not there."""
    print(NOTHING["a message"])


async def does_not_end(hand: None) -> None:
    """Waits for what never comes."""
    await asyncio.Event().wait()


async def judge(run: Callable[[None], Awaitable[None]], log: pytest.LogCaptureFixture) -> None:
    cases: Cases[None] = Cases("X")
    cases(1, "A rule.")(run)
    await assert_found(Nobody(), cases["X001"], MUTANT, log)


@pytest.mark.parametrize("run", [fails, fails_as_a_peer_leaves])
async def test_a_rule_that_is_broken_is_a_find(
    run: Callable[[None], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    await judge(run, caplog)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (passes, "a_fault survived X001"),
        (is_wrong_itself, KIT_FAILED),
        (does_not_end, DID_NOT_END),
        (fails_beside_a_crash, "KeyError: 'a grant'"),
    ],
)
async def test_whatever_else_happens_is_none(
    run: Callable[[None], Awaitable[None]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match=why):
        await judge(run, caplog)
