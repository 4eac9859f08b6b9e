"""What late and mistaken calls get, as docs/implementing.md has it in a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2
from tests.decode.harness import Harness
from tests.decode.messages import Request
from tests.decode.prefill_peer import Prefill

PAGE = Path(__file__).parents[2] / "docs" / "implementing.md"
CALLS = ("Allocate", "SendFirstToken", "Release", "Generate with a hand-off")


@dataclass
class Late:
    """Whose calls come late, and for what."""

    p: Prefill
    request: Request
    grant: str = ""


def in_flight(d: Harness, p: Prefill) -> Late:
    return Late(p, Request(), p.granted(Request()))


def ended(d: Harness, p: Prefill) -> Late:
    late = in_flight(d, p)
    p.release(late.request, Fault(Reason.ENGINE_ERROR, "boom"))
    return late


def superseded(d: Harness, p: Prefill) -> Late:
    late = in_flight(d, p)
    p.granted(Request(attempt=2))
    return late


def older(d: Harness, p: Prefill) -> Late:
    return Late(p, Request(attempt=1), p.granted(Request(attempt=2)))


def unknown(d: Harness, p: Prefill) -> Late:
    return Late(p, Request(), "g-none")


def of_another_epoch(d: Harness, p: Prefill) -> Late:
    late = in_flight(d, p)
    late.request.decode_epoch -= 1
    return late


def of_another_prefill(d: Harness, p: Prefill) -> Late:
    late = in_flight(d, p)
    late.p = Prefill(d, "p-other")
    return late


def without_a_session(d: Harness, p: Prefill) -> Late:
    late = in_flight(d, p)
    late.p = Prefill(d, "p-other")
    late.p.session_id = "s-none"
    return late


SITUATIONS: dict[str, Callable[[Harness, Prefill], Late]] = {
    "in flight": in_flight,
    "ended and remembered": ended,
    "superseded by a greater attempt": superseded,
    "an older attempt, never seen": older,
    "unknown, or forgotten": unknown,
    "of another epoch of D": of_another_epoch,
    "in flight for another P": of_another_prefill,
    "any, in a session that is unknown or superseded": without_a_session,
}
TOLD = {"what ended it, or the answer that was kept": "ENGINE_ERROR"}
"""Cells that do not begin with what a call gets: what it is here."""


def table() -> dict[str, dict[str, str]]:
    """The cells of the page: by situation, then by call."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("| of a transfer that is |")]
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    head, _, *body = rows
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def call_of(d: Harness, late: Late, call: str) -> int:
    """Make one of the calls; its number."""
    if call == "Allocate":
        return late.p.allocate(late.request)
    if call == "SendFirstToken":
        return late.p.first_token(late.request, late.grant)
    if call == "Release":
        return late.p.release(late.request)
    return d.generate(late.request)


def outcome(d: Harness, call: int) -> str:
    """What a call got: OK, also where it goes on, or a reason."""
    return d.refused[call].reason.value if call in d.refused else "OK"


def test_the_table_is_about_these() -> None:
    assert {row: tuple(cells) for row, cells in table().items()} == dict.fromkeys(SITUATIONS, CALLS)


@pytest.fixture(autouse=True)
def leave(d: Harness) -> Iterator[None]:
    """D leaves at the end, so that nothing is in flight."""
    yield
    d.feed(ev.Leaving())
    d.run()


@pytest.mark.parametrize(
    ("situation", "call"),
    [(row, call) for row, cells in table().items() for call in CALLS if cells[call] != "–"],
)
def test_a_late_call_gets_what_the_table_says(
    d: Harness, p: Prefill, situation: str, call: str
) -> None:
    cell = re.split(r"[:;,] |$", table()[situation][call])[0]
    late = SITUATIONS[situation](d, p)
    cell = TOLD.get(table()[situation][call].split(";")[0], cell)
    assert outcome(d, call_of(d, late, call)) == cell


@pytest.mark.parametrize(
    ("situation", "call", "state"),
    [
        ("ended and remembered", "SendFirstToken", "FAILED"),
        ("ended and remembered", "Release", "FAILED"),
        ("superseded by a greater attempt", "SendFirstToken", "FAILED"),
        ("superseded by a greater attempt", "Release", "FAILED"),
        ("unknown, or forgotten", "Release", "RELEASED"),
        ("in flight", "SendFirstToken", "RESERVED"),
        ("in flight", "Release", "RELEASED"),
    ],
)
def test_an_answer_has_the_state(
    d: Harness, p: Prefill, situation: str, call: str, state: str
) -> None:
    late = SITUATIONS[situation](d, p)
    answer = d.answers[call_of(d, late, call)]
    assert isinstance(answer, decode_pb2.SendFirstTokenResponse | decode_pb2.ReleaseResponse)
    assert f"TRANSFER_STATE_{state}" in str(answer)


def test_a_release_of_what_is_unknown_leaves_a_tombstone(d: Harness, p: Prefill) -> None:
    p.release(Request())
    assert d.reason(p.allocate(Request())) is Reason.RELEASED


def test_a_client_that_means_any_epoch_is_taken(d: Harness, p: Prefill) -> None:
    late = in_flight(d, p)
    late.request.decode_epoch = 0
    assert outcome(d, d.generate(late.request)) == "OK"
