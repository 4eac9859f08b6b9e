"""Each line of an instance says whose it is, and a flood of one kind is cut and counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pd_grpc.telemetry.instance_log import LINES, PERIOD_S, InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.logs import LOGGER


class Watch:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """The records of the package, of info and above."""
    caplog.set_level(logging.INFO, LOGGER)
    return caplog


def test_a_line_says_its_instance_event_and_fields_at_the_events_level(said: Any) -> None:
    InstanceLog("decode", "d0").note(Event.SESSION_LOST, "no %s", "session", peer="p0")
    (record,) = said.records
    assert (record.name, record.levelno) == ("pd_grpc.decode", logging.WARNING)
    assert (record.getMessage(), record.instance, record.event, record.peer) == (
        "no session",
        "d0",
        "session_lost",
        "p0",
    )


def test_two_instances_of_one_process_are_told_apart(said: Any) -> None:
    for name in ("p0", "p1"):
        InstanceLog("prefill", name).note(Event.INSTANCE_READY, "ready")
    assert [record.instance for record in said.records] == ["p0", "p1"]


def test_of_ten_thousand_bad_requests_some_are_written_and_the_others_counted(said: Any) -> None:
    watch = Watch()
    log = InstanceLog("router", "r", watch)
    for _ in range(10_000):
        log.note(Event.REQUEST_FAILED, "malformed", reason="BAD_REQUEST")
    assert len(said.records) == LINES
    watch.now = PERIOD_S
    log.note(Event.PEER_READY, "ready")
    told, last = said.records[LINES:]
    assert (
        told.getMessage() == f"{10_000 - LINES} lines of request_failed BAD_REQUEST were left out"
    )
    assert (told.event, told.instance, told.reason) == ("lines_left_out", "r", "BAD_REQUEST")
    assert last.event == "peer_ready"


def test_a_flood_of_one_kind_hides_no_other(said: Any) -> None:
    log = InstanceLog("router", "r", Watch())
    for _ in range(2 * LINES):
        log.note(Event.REQUEST_FAILED, "malformed", reason="BAD_REQUEST")
    log.note(Event.REQUEST_FAILED, "corrupt", reason="KV_CORRUPT")
    assert said.records[-1].getMessage() == "corrupt"


def test_after_the_period_lines_are_written_again(said: Any) -> None:
    watch = Watch()
    log = InstanceLog("router", "r", watch)
    for _ in range(LINES):
        log.note(Event.PEER_NOT_READY, "away")
    watch.now = PERIOD_S
    log.note(Event.PEER_NOT_READY, "away again")
    assert [r.getMessage() for r in said.records[LINES:]] == ["away again"], "nothing was left out"


def test_an_instance_that_stops_tells_what_it_left_out(said: Any) -> None:
    log = InstanceLog("router", "r", Watch())
    for _ in range(LINES + 3):
        log.note(Event.PEER_NOT_READY, "away")
    log.close()
    log.close()
    assert [r.getMessage() for r in said.records[LINES:]] == [
        "3 lines of peer_not_ready were left out"
    ]


def test_what_nobody_reads_is_neither_formatted_nor_counted(said: Any) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted in vain")

    log = InstanceLog("router", "r", Watch())
    for _ in range(2 * LINES):
        log.note(Event.REQUEST_FAILED, "%s", Costly(), level=logging.DEBUG)
    log.note(Event.REQUEST_FAILED, "real")
    log.close()
    assert [r.getMessage() for r in said.records] == ["real"]


def test_every_event_says_who_writes_it_and_when() -> None:
    for event in Event:
        roles = set(event.value.roles.split(", "))
        assert roles <= {"all", "prefill", "decode", "router"}, event
        assert event.value.when and not event.value.when.endswith("."), event
