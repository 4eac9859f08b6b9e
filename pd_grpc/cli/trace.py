"""`pd-grpc trace ID`: why one request was slow, from what the servers still know."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import grpc
import typer

from pd_grpc.cli.console import EXIT_FAILED, Endpoint, describe, say_error, stdout
from pd_grpc.cli.span_tree import attempts, rows, span_tree, sums
from pd_grpc.protocol import rpc
from pd_grpc.protocol.admin import TRACES_KEPT
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.span_messages import read_spans
from pd_grpc.telemetry import names
from pd_grpc.telemetry.partition import requests, whole_of
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

_ANSWER_S = 5.0
_ENDED_S = 2.0
"""How long the end of a request that has just been answered is waited for: the router's span of it
ends once the last word has left."""
_LOOK_S = 0.01


def trace(
    id: str = typer.Argument(..., help="A trace id, or the id of a request or a transfer."),
    endpoint: str = Endpoint,
    calls: bool = typer.Option(False, "--calls", help="Show the RPCs between instances too."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show where the time of one of the last requests went, as its router, prefill and decode
    instances remember it (--traces-kept). No telemetry backend is needed."""
    try:
        spans = fetch(endpoint, id)
    except grpc.RpcError as error:
        say_error(describe(rpc.read_error(error), endpoint))
        raise typer.Exit(EXIT_FAILED) from error
    if as_json:
        print(json.dumps({"trace_id": spans[0].trace_id, "spans": as_objects(spans)}))
    else:
        show(spans, calls)


def fetch(endpoint: str, wanted: str) -> list[admin_pb2.Span]:
    """The spans that an instance, and those behind it, have of a trace, or of one request of it.
    grpc.RpcError."""
    with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
        spans = list(_ask(admin_pb2_grpc.AdminServiceStub(channel), wanted).spans)
    return spans if spans[0].trace_id == wanted.lower() else of_request(spans, wanted)


def of_request(spans: Sequence[admin_pb2.Span], wanted: str) -> list[admin_pb2.Span]:
    """Of a trace that may have many requests, the spans of the one with this id, or this id of its
    transfer; all of them when it is none's."""
    works = read_spans(spans)
    named = [
        {work.span_id for work in each}
        for each in requests(works)
        if any(wanted in (w.transfer_id, w.attributes.get(names.ATTR_REQUEST_ID)) for w in each)
    ]
    mine = set().union(*named)
    known = {work.span_id: work for work in works}
    # A call belongs to the work that makes it.
    mine |= {w.span_id for w in works if (whole := whole_of(w, known)) and whole.span_id in mine}
    return [span for span in spans if span.span_id in mine] or list(spans)


def fetch_answered(endpoint: str, wanted: str) -> list[admin_pb2.Span]:
    """The same of a request that has just been answered or refused, once its end is among them:
    for that it waits a moment. None, with a word, where there are none to be had."""
    until = time.monotonic() + _ENDED_S
    try:
        with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            while not _whole(told := _ask(stub, wanted)) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            return list(told.spans)
    except grpc.RpcError as error:
        fault = rpc.read_error(error)
        none = isinstance(fault, Fault) and fault.metadata.get(TRACES_KEPT) == "0"
        why = "the servers keep none, see --traces-kept" if none else describe(fault, endpoint)
        say_error(f"no trace: {why}")
        return []


def show(spans: Sequence[admin_pb2.Span], calls: bool = False) -> None:
    """When it was, the tree, what it comes to, and what may be asked for next."""
    whose = {span.attributes.get(names.ATTR_TRANSFER_ID, "") for span in spans} - {""}
    transfers = f", transfer {', '.join(sorted(whose))}" if whose else ""
    began = min(span.start.ToDatetime() for span in spans)
    stdout.print(f"trace {spans[0].trace_id}{transfers}")
    stdout.print(f"{began.isoformat(' ', 'milliseconds')} UTC; * is what the answer waited for")
    stdout.print(span_tree(spans, calls))
    for line in [*attempts(spans), *sums(spans)]:
        stdout.print(line)


def waterfall(spans: Sequence[admin_pb2.Span]) -> list[dict[str, Any]]:
    """The bars of the tree without what else is known of each; times in milliseconds."""
    return [
        {
            "name": row.span.name,
            "instance": row.span.instance,
            "start_ms": round(row.start_ms, 3),
            "duration_ms": round(row.length_ms, 3),
            "critical": row.critical,
            "outcome": row.span.outcome,
        }
        for row in rows(spans)
    ]


def as_objects(spans: Sequence[admin_pb2.Span]) -> list[dict[str, Any]]:
    """All spans, those of the RPCs too, in the order of the tree; times in milliseconds from the
    first one's beginning."""
    return [
        {
            "name": row.span.name,
            "instance": row.span.instance,
            "role": row.span.role,
            "span_id": row.span.span_id,
            "parent_id": row.span.parent_id,
            "start_ms": round(row.start_ms, 3),
            "duration_ms": round(row.length_ms, 3),
            "critical": row.critical,
            "outcome": row.span.outcome,
            "attributes": dict(row.span.attributes),
            "events": [
                {
                    "name": event.name,
                    "after_ms": round(event.after.ToNanoseconds() / 1e6, 3),
                    "attributes": dict(event.attributes),
                }
                for event in row.span.events
            ],
        }
        for row in rows(spans, calls=True)
    ]


def _ask(stub: admin_pb2_grpc.AdminServiceStub, wanted: str) -> admin_pb2.GetTraceResponse:
    request = admin_pb2.GetTraceRequest(id=wanted, peers=True)
    answer: admin_pb2.GetTraceResponse = stub.GetTrace(request, timeout=_ANSWER_S)
    return answer


def _whole(told: admin_pb2.GetTraceResponse) -> bool:
    """Whether nothing more is to come of one request. Its work elsewhere has ended before it, but
    the router's span ends once the last word has left, and those of calls, by which a decode
    instance's own prefill is known to be the request's, end when both ends have read all."""
    roles = {span.role for span in told.spans}
    ended = any(span.name == names.SPAN_REQUEST for span in told.spans)
    each = requests(read_spans(told.spans))
    placed = all(any(work.name in names.ROUTERS_OWN for work in works) for works in each)
    return "router" not in roles or (ended and placed)
