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
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2

_ANSWER_S = 5.0
_STYLES = {"serving": "green", "draining": "yellow"}


def status(
    endpoint: str = Endpoint,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show every instance: role, endpoint, health, epoch, blocks by state, transfers in flight."""
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
    }


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
