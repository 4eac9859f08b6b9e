"""What a report is counted from."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pd_grpc.bench.endurance.asking import How, Reply, Right, wrong
from pd_grpc.bench.endurance.detection import Harm, detection_times
from pd_grpc.bench.endurance.leaks import left_in
from pd_grpc.bench.endurance.memory import MemorySeries
from pd_grpc.bench.endurance.plan import Manner
from pd_grpc.bench.endurance.soak import faults_of
from pd_grpc.bench.endurance.stalls import Stalls
from pd_grpc.bench.endurance.tally import Tally, Verdict, verdict
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.v1 import admin_pb2
from tests.waiting import until

RIGHT = Right((7, 8, 9), "abc", 4)


def whole(**changes: object) -> Reply:
    """The right answer, but for some fields."""
    values = {
        "how": How.COMPLETE,
        "token_ids": [7, 8, 9],
        "text": "abc",
        "usage": (4, 3),
        **changes,
    }
    return Reply(**values)  # type: ignore[arg-type]


def test_the_right_answer_and_the_beginning_of_it_are_right() -> None:
    assert wrong(whole(), RIGHT) == ""
    cut_short = whole(how=How.FAULT, token_ids=[7], text="a", usage=(0, 0))
    assert wrong(cut_short, RIGHT) == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": [7, 5, 9]}, "token 1 of 3 is not the right one"),
        ({"token_ids": [7, 8, 9, 9]}, "token 3 of 4 is not the right one"),
        ({"token_ids": [7, 8]}, "2 tokens in place of 3, and said to be whole"),
        ({"text": "ab"}, "the text is 'ab' in place of 'abc'"),
        ({"usage": (4, 2)}, "usage of (4, 2) tokens in place of (4, 3)"),
        ({"how": How.FAULT, "text": "x"}, "the text 'x' does not begin 'abc'"),
        ({"how": How.LEFT, "token_ids": [9]}, "token 0 of 1 is not the right one"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, object], says: str) -> None:
    assert wrong(whole(**changes), RIGHT) == says


LOST = Fault(Reason.DECODE_LOST, "gone")
LATE = Fault(Reason.STAGE_DEADLINE, "over")
TWICE = Fault(Reason.DUPLICATE_REQUEST, "again")
FULL = Fault(Reason.NO_BLOCKS, "full")
BAD = Fault(Reason.BAD_REQUEST, "what?")


@pytest.mark.parametrize(
    ("manner", "fault", "found"),
    [
        (Manner.PLAIN, LOST, Verdict.FAILED),
        (Manner.PLAIN, TWICE, Verdict.FAILED),
        (Manner.DUPLICATE, TWICE, Verdict.REFUSED),
        (Manner.REPEATED, TWICE, Verdict.REFUSED),
        (Manner.PLAIN, BAD, Verdict.FAILED),
        (Manner.INVALID, BAD, Verdict.REFUSED),
        (Manner.PLAIN, FULL, Verdict.REFUSED),
        (Manner.PLAIN, TransportFault(Code.RESOURCE_EXHAUSTED, "large"), Verdict.FAILED),
        (Manner.DEADLINE, LATE, Verdict.DEADLINE),
        (Manner.PLAIN, LATE, Verdict.HUNG),
        (Manner.PLAIN, None, Verdict.FAILED),
    ],
)
def test_a_status_counts_by_what_the_client_did(
    manner: Manner, fault: Fault | TransportFault | None, found: Verdict
) -> None:
    assert verdict(manner, Reply(how=How.FAULT, fault=fault)) is found


def test_a_call_without_an_end_hangs_and_a_client_that_left_is_none_that_failed() -> None:
    assert verdict(Manner.CANCEL, Reply(how=How.NEVER)) is Verdict.HUNG
    assert verdict(Manner.CANCEL, Reply(how=How.LEFT)) is Verdict.LEFT


def test_counts_add_up_and_failures_are_told() -> None:
    tally = Tally()
    tally.add("r1", Manner.PLAIN, whole(), "", "")
    tally.add("r2", Manner.PLAIN, Reply(how=How.FAULT, fault=LOST), "", "kill d0")
    tally.add("r3", Manner.PLAIN, whole(), "token 1 of 3", "")
    figures = tally.figures()
    assert (figures["requests"], figures["ok"], figures["wrong_tokens"]) == (3, 2, 1)
    assert figures["failed_by_code"] == {"UNAVAILABLE": 1}
    assert figures["failed_by_reason"] == {"DECODE_LOST": 1}
    assert [(each["request"], each["during"]) for each in tally.told] == [
        ("r2", "kill d0"),
        ("r3", ""),
    ]


def test_of_two_calls_of_one_name_no_more_than_one_may_be_refused_as_the_other() -> None:
    tally = Tally()
    refused = Reply(how=How.FAULT, fault=TWICE)
    assert tally.add("r1", Manner.REPEATED, refused, "", "") == ""
    assert tally.add("r1", Manner.DUPLICATE, whole(), "", "") == ""
    assert tally.add("r2", Manner.DUPLICATE, refused, "", "") == ""
    assert tally.add("r2", Manner.REPEATED, Reply(how=How.FAULT, fault=FULL), "", "") == ""
    assert tally.figures()["failed_by_reason"] == {}
    assert tally.add("r3", Manner.DUPLICATE, refused, "", "") == ""
    assert "r3 failed" in tally.add("r3", Manner.REPEATED, refused, "", "kill p0")
    figures = tally.figures()
    assert figures["failed_by_reason"] == {"DUPLICATE_REQUEST": 1}
    assert figures["refused_by_reason"] == {"DUPLICATE_REQUEST": 3, "NO_BLOCKS": 1}


GOOD: dict[str, Any] = {
    "sent": 3,
    "requests": 3,
    "failed_by_code": {},
    "recovery": True,
    "undetected": [],
    "stall_max_s": 0.2,
    "rss_growth_kib_per_1000": None,
    **dict.fromkeys(("hung", "wrong_tokens", "leaked_blocks", "leaked_transfers"), 0),
}
"""Of a report, what it is judged by."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"hung": 2}, ["2 hung"]),
        ({"leaked_blocks": 1, "leaked_transfers": 1}, ["1 leaked_blocks", "1 leaked_transfers"]),
        ({"sent": 4}, ["3 requests of 4 were judged"]),
        ({"failed_by_code": {"INTERNAL": 1}}, ["requests failed: {'INTERNAL': 1}"]),
        ({"failed_by_code": {"UNAVAILABLE": 1}, "recovery": False}, []),
        ({"undetected": ["kill d0", "stop p1"]}, ["not noticed: kill d0, stop p1"]),
        ({"undetected": ["stop p1"], "stall_max_s": 1.0}, []),
        ({"rss_growth_kib_per_1000": 1023.9}, []),
        ({"rss_growth_kib_per_1000": 1024.0}, ["rss_growth_kib_per_1000 1024 is not under 1024"]),
    ],
)
def test_a_report_is_judged(changes: dict[str, Any], says: list[str]) -> None:
    assert faults_of({**GOOD, **changes}) == says


def test_memory_is_followed_in_processes_that_live_long_enough() -> None:
    series = MemorySeries()
    for sent in range(0, 6001, 100):
        # It grows by 5 MiB until it has settled, and from then on by 100 KiB for 1,000 requests.
        settling = 5000.0 * min(sent, 2000) / 2000
        series.add(sent, {1: ("d0", settling + 0.1 * sent), 1000 + sent: ("d1", 9.0 * sent)})
    assert series.growth_kib_per_1000() == pytest.approx({"d0": 100.0})


def test_a_harm_is_noticed_when_its_instance_turns_not_ready_meanwhile() -> None:
    harms = [Harm("d0", 10, "kill d0"), Harm("p0", 20, "stop p0")]
    changes = [(9.0, "d0", False), (10.5, "p0", False), (11.0, "d0", False), (11.5, "d0", True)]
    assert detection_times(harms, changes) == ([1.0], ["stop p0"])


def test_what_is_left_in_a_server_is_what_it_says_itself() -> None:
    info = admin_pb2.ServerInfo(settings={"num_blocks": "10"})
    info.blocks.add(state=admin_pb2.BLOCK_STATE_FREE, blocks=5)
    info.blocks.add(state=admin_pb2.BLOCK_STATE_CACHED, blocks=2)
    info.blocks.add(state=admin_pb2.BLOCK_STATE_DECODING, blocks=2)
    info.transfers.add(state=1, transfers=3)
    left = left_in("d0", info)
    assert (left.blocks, left.transfers) == (3, 3)
    assert left.words == (
        "d0: 2 blocks BLOCK_STATE_DECODING",
        "d0: 1 of 10 blocks in no state",
        "d0: 3 transfers in flight",
    )


async def test_a_loop_that_is_held_up_is_seen() -> None:
    async with Stalls().watched() as stalls:
        await until(lambda: stalls.longest_s > 0.0)
        threading.Event().wait(0.3)
        await until(lambda: stalls.longest_s >= 0.2)
