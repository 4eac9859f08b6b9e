"""`pd-grpc trace ID`: why one request was slow, from what the servers still know."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import grpc
import typer

from pd_grpc.cli.console import EXIT_FAILED, Endpoint, describe, say_error, stdout
from pd_grpc.cli.span_tree import rows, span_tree
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.telemetry import names
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc

_ANSWER_S = 5.0
_ENDED_S = 2.0
"""How long the end of a request that has just been answered is waited for: its spans end with the
last word of each call."""
_LOOK_S = 0.05


def trace(
    id: str = typer.Argument(..., help="A trace id, or the id of a request or a transfer."),
    endpoint: str = Endpoint,
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
        show(spans)


def fetch(endpoint: str, wanted: str, ended: bool = False) -> list[admin_pb2.Span]:
    """The spans that a router and the instances behind it have of a request; with `ended` not
    before the request's own span is among them, or some time has passed. grpc.RpcError."""
    request = admin_pb2.GetTraceRequest(id=wanted, peers=True)
    until = time.monotonic() + _ENDED_S
    with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while True:
            try:
                spans = list(stub.GetTrace(request, timeout=_ANSWER_S).spans)
            except grpc.RpcError:
                if not ended or time.monotonic() > until:
                    raise
                spans = []
            whole = any(span.name == names.SPAN_REQUEST for span in spans)
            if whole or not ended or time.monotonic() > until:
                return spans
            time.sleep(_LOOK_S)


def show(spans: Sequence[admin_pb2.Span]) -> None:
    """The tree, and what may be asked for next."""
    whose = {span.attributes.get(names.ATTR_TRANSFER_ID, "") for span in spans} - {""}
    transfers = f", transfer {', '.join(sorted(whose))}" if whose else ""
    stdout.print(f"trace {spans[0].trace_id}{transfers}")
    stdout.print(span_tree(spans))


def as_objects(spans: Sequence[admin_pb2.Span]) -> list[dict[str, Any]]:
    """The spans in the order of the tree; times in milliseconds from the first one's beginning."""
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
        for row in rows(spans)
    ]
