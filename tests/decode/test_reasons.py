"""Every row of the status table that D raises is met by its reason in some test here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pd_grpc.decode
from pd_grpc.protocol.faults import Reason

CODE = Path(pd_grpc.decode.__file__).parent
TESTS = Path(__file__).parent
BY_HELPER = {"bad_request": Reason.BAD_REQUEST, "stage_deadline": Reason.STAGE_DEADLINE}


def named(folder: Path, pattern: str) -> set[Reason]:
    """The reasons that the Python files of a folder name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob(pattern))
    found = {Reason[name] for name in re.findall(r"\bReason\.([A-Z_]+)\b", text)}
    return found | {reason for helper, reason in BY_HELPER.items() if f"{helper}(" in text}


RAISED = sorted(named(CODE, "*.py"), key=lambda reason: reason.value)


@pytest.mark.parametrize("reason", RAISED, ids=lambda reason: reason.value)
def test_a_reason_that_is_raised_is_tested(reason: Reason) -> None:
    assert reason in named(TESTS, "test_[!r]*.py") | named(TESTS, "test_receiver.py")


def test_what_is_never_raised_here_belongs_to_others() -> None:
    assert set(Reason) - set(RAISED) == {
        Reason.CREDENTIALS,
        Reason.DECODE_LOST,
        Reason.NO_INSTANCE,
        Reason.ROLE,
        Reason.SENDER_STUCK,
    }
