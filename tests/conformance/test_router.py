"""The kit judges our own router: it passes whole, and each planted fault is found."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.conformance.case import Broken, answers_within
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.router import ROUTER_CASES, open_instances, open_router
from pd_grpc.conformance.router.subject import RouterSubject
from pd_grpc.conformance.run import run_cases
from pd_grpc.conformance.transcript import Transcript
from tests.conformance.mutants.judging import assert_found
from tests.conformance.mutants.registry import Mutant
from tests.conformance.mutants.router import ROUTER_MUTANTS
from tests.conformance.subjects import TRIES, router_server

ANY_PORT = ("127.0.0.1:0",) * 3


@contextlib.asynccontextmanager
async def our_router(**settings: Any) -> AsyncIterator[RouterSubject]:
    async with (
        open_instances(*ANY_PORT) as instances,
        router_server(*instances.endpoints, **settings) as router,
        open_router(router.endpoint, instances) as subject,
    ):
        yield subject


@pytest.mark.longest
@pytest.mark.timeout(600)
async def test_our_router_passes_whole() -> None:
    async with our_router() as subject:
        results = await run_cases(subject, ROUTER_CASES, tries=TRIES)
    assert not [explained(r) for r in results if r.passed is False]
    assert not [r.id for r in results if r.passed is None], "every case applies to our own router"


@pytest.mark.planted
@pytest.mark.parametrize(("case_id", "mutant"), ROUTER_MUTANTS.params())
async def test_a_planted_fault_is_found(
    case_id: str,
    mutant: Mutant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mutant.plant(monkeypatch)
    async with our_router(**mutant.settings) as subject:
        await assert_found(subject, ROUTER_CASES[case_id], mutant, caplog)


@pytest.mark.parametrize(
    "failure",
    [
        Broken("a rule is broken"),
        grpc.aio.AioRpcError(
            grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), None, None
        ),
    ],
    ids=["a rule broken", "a call failed"],
)
async def test_after_a_case_that_failed_the_router_has_the_kits_instances_again(
    failure: Exception,
) -> None:
    async with our_router() as subject:
        d = subject.instances.d
        with pytest.raises(type(failure)):
            async with subject.case("R000", Transcript()):
                # As where the kit is late for a heartbeat: no case has wanted it.
                d.control.set_ready(False, "late")
                raise failure
        assert d.control.ready


async def test_a_router_need_not_tell_its_limits() -> None:
    cases = [ROUTER_CASES[case_id] for case_id in ("R107", "R136", "R137", "R138", "R821")]
    async with our_router() as subject:
        subject.info.max_model_len = subject.info.vocab_size = 0
        results = await run_cases(subject, cases, tries=TRIES)
    assert not [explained(r) for r in results if r.passed is False]
    assert [r.id for r in results if r.passed is None] == ["R107", "R136", "R137", "R138"]


async def test_a_router_that_calls_others_cannot_be_judged() -> None:
    answers_within(0.3)
    async with (
        open_instances(*ANY_PORT) as mine,
        open_instances(*ANY_PORT) as others,
        router_server(*others.endpoints) as router,
    ):
        with pytest.raises(Broken, match=f"--prefill {mine.p.endpoint} --decode"):
            async with open_router(router.endpoint, mine):
                pass
