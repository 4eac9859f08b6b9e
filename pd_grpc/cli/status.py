"""`pd-grpc status`: the router and every instance behind it."""

from __future__ import annotations

import json
from typing import Any

import grpc
import typer
from rich.table import Table

from pd_grpc.cli.console import EXIT_FAILED, Endpoint, describe, say_error, stdout
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2

_ANSWER_S = 5.0
_STYLES = {"serving": "green", "draining": "yellow"}


def status(
    endpoint: str = Endpoint,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show every instance: role, endpoint, health, epoch, blocks by state, transfers in flight,
    what the router tried elsewhere, and the prepare pool of each P. With --json the configuration
    in force too."""
    request = admin_pb2.GetServerInfoRequest(peers=True)
    try:
        with rpc.sync_channel(endpoint, Timeouts(), Sizes()) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = stub.GetServerInfo(request, timeout=_ANSWER_S)
    except grpc.RpcError as error:
        say_error(describe(rpc.read_error(error), endpoint))
        raise typer.Exit(EXIT_FAILED) from error
    instances = [_as_object(info) for info in (answer.server, *answer.peers)]
    if as_json:
        print(json.dumps({"instances": instances}))
    else:
        stdout.print(_table(instances))
        for line in _recoveries(instances):
            stdout.print(line)
        if (lanes := _lanes(instances)) is not None:
            stdout.print(lanes)


def _as_object(info: admin_pb2.ServerInfo) -> dict[str, Any]:
    return {
        "role": _word(types_pb2.Role.Name(info.instance.role), "ROLE_"),
        "endpoint": info.endpoint,
        "name": info.instance.name,
        "epoch": info.instance.epoch,
        "health": _word(admin_pb2.Health.Name(info.health), "HEALTH_"),
        "health_reason": info.health_reason,
        "model": info.model,
        "blocks": {
            _word(admin_pb2.BlockState.Name(b.state), "BLOCK_STATE_"): b.blocks for b in info.blocks
        },
        "transfers": sum(count.transfers for count in info.transfers),
        "transfers_by_state": {
            _word(types_pb2.TransferState.Name(t.state), "TRANSFER_STATE_"): t.transfers
            for t in info.transfers
        },
        "paused": info.paused,
        "recovery": _recovery(info.recovery) if info.HasField("recovery") else None,
        "prepare": [_lane(lane) for lane in info.prepare],
        "settings": dict(info.settings),
    }


def _recovery(recovery: admin_pb2.Recovery) -> dict[str, int]:
    return {
        "retries": recovery.retries,
        "continuations": recovery.continuations,
        "refused": recovery.refused,
        "budget_left": recovery.budget_left,
    }


def _lane(lane: admin_pb2.PrepareLane) -> dict[str, Any]:
    return {
        "decode": lane.decode,
        "in_flight": lane.in_flight,
        "ready": lane.ready,
        "waiting": lane.waiting,
        "backoff_left_s": seconds(lane.backoff_left),
        "breaker": _word(admin_pb2.BreakerState.Name(lane.breaker), "BREAKER_STATE_"),
        "breaker_left_s": seconds(lane.breaker_left),
        "breaker_fault": lane.breaker_fault.message,
    }


def _recoveries(instances: list[dict[str, Any]]) -> list[str]:
    """What each router tried elsewhere, a line for one that did."""
    lines = []
    for i in instances:
        counts = i["recovery"] or {}
        done = [
            f"{n} {counts[n]}" for n in ("retries", "continuations", "refused") if counts.get(n)
        ]
        if done:
            left = f"the retry budget has {counts['budget_left']} left"
            lines.append(f"{i['name']} tried requests elsewhere: {', '.join(done)}; {left}")
    return lines


def _lanes(instances: list[dict[str, Any]]) -> Table | None:
    """The prepare pools of all P, a row for each D; None when nothing is in preparation."""
    table = Table(title="in preparation")
    for column in ("prefill", "decode", "in flight", "ready", "waiting", "may be asked"):
        table.add_column(column, overflow="fold")
    for i in instances:
        for lane in i["prepare"]:
            numbers = (str(lane[name]) for name in ("in_flight", "ready", "waiting"))
            table.add_row(i["name"], lane["decode"], *numbers, _may_be_asked(lane, i["paused"]))
    return table if table.row_count else None


def _may_be_asked(lane: dict[str, Any], paused: bool) -> str:
    if paused:
        return "no, paused"
    if lane["breaker"] == "open":
        return f"no, for {lane['breaker_left_s']:.2f} s: {lane['breaker_fault']}"
    if lane["backoff_left_s"]:
        return f"no, for {lane['backoff_left_s']:.2f} s: it has no room"
    return "by one that probes" if lane["breaker"] == "half_open" else "yes"


def _table(instances: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("role", "name", "endpoint", "health", "epoch", "blocks", "transfers"):
        table.add_column(column, overflow="fold")
    for i in instances:
        health = i["health"] + (f" ({i['health_reason']})" if i["health_reason"] else "")
        style = _STYLES.get(i["health"], "red")
        table.add_row(
            i["role"],
            i["name"],
            i["endpoint"],
            f"[{style}]{health}[/]",
            str(i["epoch"]),
            _counts(i["blocks"]),
            _counts(i["transfers_by_state"]) or "0",
        )
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
