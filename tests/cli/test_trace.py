"""`pd-grpc trace` and `generate --trace`, of real servers; and the tree they print."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rich.console import Console

from pd_grpc.cli.span_tree import attempts, rows, span_tree, sums
from pd_grpc.cli.trace import of_request
from pd_grpc.v1 import admin_pb2
from tests.cli.running import pd_grpc
from tests.cluster import cluster

KEPT: dict[str, Any] = {"traces_kept": 16, "router_settings": {"traces_kept": 16}}
CRITICAL = ["pd.route", "pd.queue", "pd.prepare", "pd.queue", "pd.compute", "pd.first_token"]
SPANS = {*CRITICAL, "pd.request", "pd.prefill_request", "pd.allocate", "pd.send", "pd.reserve"}
SPANS |= {"pd.receive", "pd.decode", "pd.step_wait"}
BEHIND = ["pd.step_wait", "pd.decode"]


def span(
    name: str, id: str, parent: str, start_ms: int, length_ms: int, outcome: str = "ok"
) -> admin_pb2.Span:
    made = admin_pb2.Span(
        name=name, span_id=id, parent_id=parent, instance="p0", outcome=outcome, trace_id="t"
    )
    if name.startswith("pd."):
        made.attributes["pd.transfer_id"] = "t-1"
        made.attributes["pd.attempt"] = "1"
    made.start.FromMilliseconds(1_700_000_000_000 + start_ms)
    made.duration.FromMilliseconds(length_ms)
    return made


def names(spans: list[dict[str, Any]]) -> set[str]:
    """Of those that are work and no calls."""
    return {each["name"] for each in spans if each["name"].startswith("pd.")}


def test_a_span_stands_below_its_whole_in_the_order_of_time() -> None:
    spans = [
        span("pd.compute", "c", "a", 20, 10),
        span("pd.request", "a", "gone", 0, 50),
        span("pd.queue", "b", "a", 10, 10),
        span("pd.allocate", "d", "b", 12, 3),
    ]
    found = [(row.span.name, row.depth, row.start_ms, row.critical) for row in rows(spans)]
    assert found == [
        ("pd.request", 0, 0.0, False),
        ("pd.queue", 1, 10.0, True),
        ("pd.allocate", 2, 12.0, False),
        ("pd.compute", 1, 20.0, True),
    ]


def test_bars_lie_where_the_time_went_and_a_fault_is_named() -> None:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(
            span_tree(
                [
                    span("pd.request", "a", "", 0, 44, "NO_BLOCKS"),
                    span("pd.prepare", "b", "a", 22, 22),
                ]
            )
        )
    lines = captured.get().splitlines()
    assert lines == [
        "  span          of    ms",
        "  pd.request    p0  44.0  " + "█" * 44 + " NO_BLOCKS",
        "*   pd.prepare  p0  22.0  " + " " * 22 + "█" * 22,
    ]


CALL = "pd_grpc.v1.PrefillService/Prefill"


def test_the_calls_between_two_pieces_of_work_are_shown_where_they_are_asked_for() -> None:
    spans = [
        span("pd.request", "a", "", 0, 50),
        span(CALL, "client", "a", 1, 40),
        span(CALL, "server", "client", 2, 38),
        span("pd.prefill_request", "b", "server", 3, 36),
    ]
    assert [(row.span.name, row.depth) for row in rows(spans)] == [
        ("pd.request", 0),
        ("pd.prefill_request", 1),
    ]
    assert [(row.span.name, row.depth) for row in rows(spans, calls=True)] == [
        ("pd.request", 0),
        (CALL, 1),
        (CALL, 2),
        ("pd.prefill_request", 3),
    ]


def test_work_whose_call_is_not_known_stands_below_its_request() -> None:
    spans = [
        span("pd.request", "a", "client", 0, 50),
        span("pd.prefill_request", "b", "gone", 3, 36),
        span("pd.queue", "c", "b", 3, 1),
    ]
    for calls in (False, True):
        found = [(row.span.name, row.depth) for row in rows(spans, calls)]
        assert found == [("pd.request", 0), ("pd.prefill_request", 1), ("pd.queue", 2)]


def test_a_trace_of_calls_alone_has_no_bars() -> None:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(span_tree([span(CALL, "a", "", 0, 1)]))
    assert captured.get().split() == ["span", "of", "ms"]


def test_two_that_name_each_other_as_their_whole_end() -> None:
    spans = [
        span("pd.a", "a", "b", 0, 1),
        span("pd.b", "b", "a", 0, 1),
        span("pd.c", "c", "", 0, 1),
    ]
    assert [row.span.name for row in rows(spans)] == ["pd.c"]


def test_of_a_trace_with_many_requests_the_one_that_was_asked_for_is_shown() -> None:
    ours, other = (
        [
            span("pd.request", f"a{n}", "app", n, 50),
            span(CALL, f"client{n}", f"a{n}", n, 40),
            span(CALL, f"server{n}", f"client{n}", n, 38),
            span("pd.prefill_request", f"b{n}", f"server{n}", n, 36),
        ]
        for n in (1, 2)
    )
    for spans, n in ((ours, 1), (other, 2)):
        for each in spans:
            if each.attributes:
                each.attributes["pd.transfer_id"] = f"t-{n}"
        spans[0].attributes["pd.request_id"] = f"r-{n}"
    assert of_request([*ours, *other], "r-1") == ours
    assert of_request([*ours, *other], "t-2") == other
    assert of_request(ours, "unknown") == ours


async def test_an_operator_reads_the_trace_of_an_answer_without_a_backend() -> None:
    async with cluster(**KEPT) as running:
        where = ("--endpoint", running.router.endpoint)

        async def run(*arguments: str) -> str:
            done = await asyncio.to_thread(pd_grpc, *arguments, *where)
            assert done.returncode == 0, done.stderr
            return done.stdout

        answer = json.loads(
            await run("generate", "some words to read", "--max-tokens", "4", "--trace", "--json")
        )
        bars = answer["waterfall"]
        assert {bar["name"] for bar in bars} == SPANS
        assert {bar["outcome"] for bar in bars} == {"ok"}
        assert {bar["instance"] for bar in bars} == {"router", "p0", "d0"}
        critical = [bar["name"] for bar in bars if bar["critical"] and bar["name"] != "pd.send"]
        # A part stands behind its whole.
        assert critical == [*CRITICAL, *reversed(BEHIND)]
        begins = min(bar["start_ms"] for bar in bars)
        assert begins == 0 and all(bar["duration_ms"] >= 0 for bar in bars)
        assert names(answer["spans"]) == SPANS
        for wanted in (answer["trace_id"], answer["request_id"]):
            told = json.loads(await run("trace", wanted, "--json"))
            assert told["trace_id"] == answer["trace_id"]
            assert names(told["spans"]) == SPANS
        shown = await run("trace", answer["trace_id"])
        assert shown.startswith(f"trace {answer['trace_id']}, transfer t-")
        assert "* " in shown and "pd.first_token" in shown and "pd_grpc.v1" not in shown
        assert "\nfirst token after " in shown and "\nsecond token behind it by " in shown
        assert "pd_grpc.v1" in await run("trace", answer["trace_id"], "--calls")
        unknown = await asyncio.to_thread(pd_grpc, "trace", "r-unknown", *where)
        assert unknown.returncode == 1
        assert "UNKNOWN_TRANSFER" in unknown.stderr and unknown.stdout == ""


async def test_each_choice_of_a_request_has_its_own_sums() -> None:
    words = " ".join(["word"] * 40)
    async with cluster(**KEPT) as running:
        asked = ("generate", words, "-n", "2", "--max-tokens", "4", "--ignore-eos")
        where = ("--endpoint", running.router.endpoint)
        done = await asyncio.to_thread(pd_grpc, *asked, *where, "--trace", "--json")
        answer = json.loads(done.stdout)
        shown = await asyncio.to_thread(pd_grpc, "trace", answer["trace_id"], *where)
    assert names(answer["spans"]) == SPANS | {"pd.choice"}
    choices = [bar for bar in answer["waterfall"] if bar["name"] == "pd.choice"]
    assert [bar["outcome"] for bar in choices] == ["ok", "ok"]
    assert shown.stdout.count("\nfirst token after ") == 2
    assert shown.stdout.count("\nsecond token behind it by ") == 2


async def test_a_request_that_failed_shows_where() -> None:
    small = {"num_blocks": 4}
    async with cluster(prefill_settings=small, decode_settings=small, **KEPT) as c:
        where = ("--endpoint", c.router.endpoint)
        words = " ".join(["word"] * 300)
        asked = ("generate", words, "--raw", "--trace", *where)
        failed = await asyncio.to_thread(pd_grpc, *asked)
        for_programs = await asyncio.to_thread(pd_grpc, *asked, "--json")
    assert failed.returncode == for_programs.returncode == 1
    assert "TOO_LARGE" in failed.stderr and "TOO_LARGE" in for_programs.stderr
    assert for_programs.stdout == ""
    (line,) = [each for each in failed.stdout.splitlines() if "pd.request" in each]
    assert line.endswith(" TOO_LARGE")


async def test_of_servers_that_keep_no_traces_one_line_says_so_at_once() -> None:
    nothing: dict[str, Any] = {"traces_kept": 0, "router_settings": {"traces_kept": 0}}
    async with cluster(**nothing) as running:
        where = ("--endpoint", running.router.endpoint)
        asked = ("generate", "some words", "--max-tokens", "4", *where)
        done = await asyncio.to_thread(pd_grpc, *asked, "--trace", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["waterfall"] == []
        (line,) = done.stderr.splitlines()
        assert line.endswith("no trace: the servers keep none, see --traces-kept")
        unknown = await asyncio.to_thread(pd_grpc, "trace", "r-unknown", *where)
        assert unknown.returncode == 1 and "traces_kept is 0" in unknown.stderr


async def test_a_decode_instance_that_prefills_shows_that() -> None:
    async with cluster(aggregated=True, **KEPT) as running:
        asked = ("generate", "some words", "--max-tokens", "4", "--json")
        done = await asyncio.to_thread(pd_grpc, *asked, "--endpoint", running.router.endpoint)
    bars = json.loads(done.stdout)["waterfall"]
    critical = [(bar["name"], bar["instance"]) for bar in bars if bar["critical"]]
    local = ["pd.queue", "pd.compute", *reversed(BEHIND)]
    assert critical == [("pd.route", "router"), *((name, "d0") for name in local)]


def test_a_request_that_was_refused_at_the_door_has_no_sums() -> None:
    assert sums([span("pd.request", "a", "", 0, 1, "BAD_REQUEST")]) == []


def test_an_attempt_elsewhere_has_a_line_and_so_has_who_left_no_span() -> None:
    request = span("pd.request", "a", "", 0, 500)
    request.attributes["pd.prefill"], request.attributes["pd.decode"] = "p0", "d2"
    event = request.events.add(name="pd.recovery")
    event.after.FromMilliseconds(120)
    event.attributes.update(
        {
            "pd.attempt": "2",
            "pd.recovery.kind": "continuation",
            "error.type": "DECODE_LOST",
            "pd.peer": "d1",
        }
    )
    assert attempts([request, span("pd.compute", "b", "a", 10, 10)]) == [
        "attempt 2 (continuation) after 120.0 ms: DECODE_LOST of d1",
        "nothing is known here of the part of d1, d2",
    ]
