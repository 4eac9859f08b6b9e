"""When a planted fault counts as found: its case fails by the rule, and not because the server or
the kit broke down."""

from __future__ import annotations

from typing import Any

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from pd_grpc.conformance.case import Case, answers_within
from pd_grpc.conformance.run import DID_NOT_END, KIT_FAILED, Subject, run_case
from tests.conformance.mutants.registry import Mutant

IMPATIENT_S = 1.0
"""How long a faulty server may leave a case waiting. The subject is met with the usual patience: it
is the fault that is to be found, and not a busy machine."""


async def assert_found(
    subject: Subject[Any], case: Case[Any], mutant: Mutant, log: pytest.LogCaptureFixture
) -> None:
    """Run a case before a server with a fault: it must fail as it would for any implementation."""
    answers_within(IMPATIENT_S)
    result = await run_case(subject, case)
    assert result.passed is False, f"{mutant.name} survived {case.id}"
    assert not result.explanation.startswith((KIT_FAILED, DID_NOT_END)), result.explanation
    assert_no_crash(log)


def assert_no_crash(log: pytest.LogCaptureFixture) -> None:
    """A fault that ends a handler with a traceback is another one than was planted."""
    # grpc logs ExecuteBatchError where a peer leaves a call just as it is written to.
    crashes = [
        record
        for record in log.records
        if record.exc_info and record.exc_info[0] not in (None, cygrpc.ExecuteBatchError)
    ]
    assert not crashes, "\n".join(log.handler.format(record) for record in crashes)
