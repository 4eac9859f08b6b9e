"""What `pd-grpc status` makes of a P's prepare pool and of what a router tried elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from pd_grpc.cli.status import _as_object, _lanes, _recoveries
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import admin_pb2, types_pb2


def info(*lanes: admin_pb2.PrepareLane, paused: bool = False) -> admin_pb2.ServerInfo:
    instance = types_pb2.Instance(name="p-1", epoch=7, role=types_pb2.ROLE_PREFILL)
    return admin_pb2.ServerInfo(
        instance=instance, prepare=lanes, paused=paused, settings={"prepare_window": "32"}
    )


def lane(
    breaker: admin_pb2.BreakerState = admin_pb2.BREAKER_STATE_CLOSED, **fields: Any
) -> admin_pb2.PrepareLane:
    fields |= {"in_flight": 3, "ready": 2, "waiting": 40}
    return admin_pb2.PrepareLane(decode="d:1", breaker=breaker, **fields)


def shown(told: admin_pb2.ServerInfo) -> str:
    table = _lanes([_as_object(told)])
    assert table is not None
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_has_the_lanes_and_the_settings_in_force() -> None:
    made = _as_object(info(lane(backoff_left=duration(0.5)), paused=True))
    assert made["settings"] == {"prepare_window": "32"}
    assert made["paused"] is True
    (first,) = made["prepare"]
    assert (first["decode"], first["in_flight"], first["ready"], first["waiting"]) == (
        "d:1",
        3,
        2,
        40,
    )
    assert (first["backoff_left_s"], first["breaker"]) == (0.5, "closed")


def test_the_table_says_whether_a_d_may_be_asked_and_why_not() -> None:
    lost = Fault(Reason.DECODE_LOST, "nobody there").status()
    opened = lane(admin_pb2.BREAKER_STATE_OPEN, breaker_left=duration(1.5), breaker_fault=lost)
    assert "yes" in shown(info(lane()))
    assert "no, for 0.50 s: it has no room" in shown(info(lane(backoff_left=duration(0.5))))
    assert "no, for 1.50 s: nobody there" in shown(info(opened))
    assert "by one that probes" in shown(info(lane(admin_pb2.BREAKER_STATE_HALF_OPEN)))
    assert "no, paused" in shown(info(lane(), paused=True))


def test_without_anything_in_preparation_there_is_no_second_table() -> None:
    assert _lanes([_as_object(info())]) is None


def test_what_a_router_tried_elsewhere_has_a_line() -> None:
    counts = admin_pb2.Recovery(retries=2, continuations=31, budget_left=969)
    router = types_pb2.Instance(name="r-1", epoch=7, role=types_pb2.ROLE_ROUTER)
    told = _as_object(admin_pb2.ServerInfo(instance=router, recovery=counts))
    assert told["recovery"] == {
        "retries": 2,
        "continuations": 31,
        "refused": 0,
        "budget_left": 969,
    }
    (line,) = _recoveries([told, _as_object(info())])
    assert line == (
        "r-1 tried requests elsewhere: retries 2, continuations 31; the retry budget has 969 left"
    )


def test_a_router_that_tried_nothing_elsewhere_has_none() -> None:
    idle = _as_object(admin_pb2.ServerInfo(recovery=admin_pb2.Recovery(budget_left=1000)))
    assert _recoveries([idle]) == []
    assert _as_object(info())["recovery"] is None
