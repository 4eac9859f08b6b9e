"""Every row of the status table that some part raises or reads is met by its reason in a test of
that part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import pd_grpc
from pd_grpc.protocol.faults import Reason

CODE = Path(pd_grpc.__file__).parent
TESTS = Path(__file__).parents[1]
PARTS = ("decode", "prefill", "router")
BY_HELPER = {"bad_request": Reason.BAD_REQUEST, "stage_deadline": Reason.STAGE_DEADLINE}
TABLE = {CODE / "protocol" / "faults.py", TESTS / "protocol" / "test_faults.py", Path(__file__)}
"""Files that name reasons without raising or meeting them."""

RESERVED = {Reason.CREDENTIALS, Reason.ROLE}
"""Known to those who read them, raised by nobody in v1."""
ONLY_READ = {"prefill": {Reason.DUPLICATE_REQUEST, Reason.PREFILL_LOST}}
"""What a part knows from others alone."""


def named(files: Iterable[Path]) -> set[Reason]:
    """The reasons that Python files name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path not in TABLE)
    found = {Reason[name] for name in re.findall(r"\bReason\.([A-Z_]+)\b", text)}
    return found | {reason for helper, reason in BY_HELPER.items() if f"{helper}(" in text}


def in_order(reasons: set[Reason]) -> list[Reason]:
    return sorted(reasons, key=lambda reason: reason.value)


HALVES = {"decode": (CODE / "transport").rglob("*.py")}
"""What takes KV in for a part."""

RAISED = {
    part: named([*(CODE / part).glob("*.py"), *HALVES.get(part, ())])
    - RESERVED
    - ONLY_READ.get(part, set())
    for part in PARTS
}
RAISED_ANYWHERE = named(CODE.rglob("*.py")) - RESERVED


@pytest.mark.parametrize(
    ("part", "reason"),
    [(part, reason) for part in PARTS for reason in in_order(RAISED[part])],
    ids=lambda value: value.value if isinstance(value, Reason) else value,
)
def test_a_reason_that_a_part_raises_is_tested_there(part: str, reason: Reason) -> None:
    assert reason in named((TESTS / part).glob("test_*.py"))


@pytest.mark.parametrize("reason", in_order(RAISED_ANYWHERE), ids=lambda reason: reason.value)
def test_a_reason_that_is_raised_anywhere_is_tested(reason: Reason) -> None:
    assert reason in named(TESTS.rglob("test_*.py"))


def test_what_is_never_raised_by_decode_belongs_to_others() -> None:
    assert set(Reason) - RAISED["decode"] == {
        Reason.CREDENTIALS,
        Reason.DECODE_LOST,
        Reason.NO_INSTANCE,
        Reason.ROLE,
        Reason.SENDER_STUCK,
    }


def test_nothing_but_what_is_reserved_is_never_raised() -> None:
    assert set(Reason) - RAISED_ANYWHERE == RESERVED
