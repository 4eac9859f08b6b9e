"""Running cases against a subject, one after another, and what came of each."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import grpc

from pd_grpc.conformance.case import Broken, Case, NotApplicable
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol.rpc import read_error

S = TypeVar("S", covariant=True)
C = TypeVar("C")

EXPLAINED_MESSAGES = 40
"""Messages shown of a case that failed, the last ones."""

KIT_FAILED = "the kit failed"
"""How the explanation begins where it was the kit that went wrong, and not the subject."""
DID_NOT_END = "the case did not end within"
"""How it begins where neither came to an end."""


class Subject(Protocol[S]):
    """An implementation under test."""

    @property
    def patience_s(self) -> float:
        """How long one case may take at most, given the times that the subject announces."""

    def case(self, case_id: str, transcript: Transcript) -> AbstractAsyncContextManager[S]:
        """What a case has in hand; at its end everything the case held must be back. Broken when
        it is not."""


@dataclass(frozen=True)
class Result:
    """What came of a case. `passed` is None where it does not apply to the subject; `failed_before`
    has the explanation of each try before this one, where a case was tried again."""

    id: str
    rule: str
    title: str
    passed: bool | None
    explanation: str
    messages: list[str] = field(default_factory=list)
    seconds: float = 0.0
    failed_before: list[str] = field(default_factory=list)


async def run_cases(
    subject: Subject[C],
    cases: Iterable[Case[C]],
    report: Callable[[Result], None] = lambda _: None,
    tries: int = 1,
) -> list[Result]:
    """Run cases in order; `report` hears of each as it ends. See `run_case` for `tries`."""
    results = []
    for case in cases:
        results.append(await run_case(subject, case, tries))
        report(results[-1])
    return results


async def run_case(subject: Subject[C], case: Case[C], tries: int = 1) -> Result:
    """Run one case, and where it fails again, up to `tries` times in all: what breaks a rule
    breaks it each time, and a machine that stands still for longer than the subject's times allow
    does not. What the last try came to counts, and the result tells of those before."""
    failed_before: list[str] = []
    began = time.monotonic()
    while True:
        result = await _try(subject, case)
        if result.passed is not False or len(failed_before) + 1 >= tries:
            took = time.monotonic() - began
            return replace(result, seconds=took, failed_before=failed_before)
        failed_before.append(result.explanation)


async def _try(subject: Subject[C], case: Case[C]) -> Result:
    transcript = Transcript()

    def result(passed: bool | None, explanation: str) -> Result:
        shown = transcript.tail(EXPLAINED_MESSAGES) if passed is False else []
        return Result(case.id, case.rule, case.title, passed, explanation, shown)

    try:
        await asyncio.wait_for(_run(subject, case, transcript), subject.patience_s)
    except NotApplicable as why:
        return result(None, f"does not apply: {why}")
    except asyncio.TimeoutError:
        return result(False, f"{DID_NOT_END} {subject.patience_s:g} s")
    except Broken as why:
        return result(False, str(why))
    except grpc.RpcError as error:
        return result(False, f"a call failed that should not have: {read_error(error)}")
    except Exception:  # noqa: BLE001 - a judge gives a verdict on every case
        return result(False, f"{KIT_FAILED}: {traceback.format_exc()}")
    return result(True, "")


async def _run(subject: Subject[C], case: Case[C], transcript: Transcript) -> None:
    async with subject.case(case.id, transcript) as hand:
        await case.run(hand)
