"""`pd-grpc soak`: whether a system keeps its promises while everything in it fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pd_grpc.cli.console import EXIT_FAILED, EXIT_USAGE, progress, say_error, stdout

_FIGURES = (
    "requests",
    "ok",
    "refused",
    "cancelled_by_client",
    "deadline_of_client",
    "failed_by_code",
    "hung",
    "wrong_tokens",
    "leaked_blocks",
    "leaked_transfers",
    "recovered_by_retry",
    "recovered_by_continuation",
    "faults_injected",
    "p99_detect_s",
    "rss_growth_kib_per_1000",
    "took_s",
)


def soak(
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=1, help="How many to send.")
    ] = 10_000,
    seed: Annotated[
        int,
        typer.Option(
            metavar="S", min=0, help="The same seed does the same harm to the same requests."
        ),
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
    ] = None,
) -> None:
    """Send requests to two prefill and two decode servers that are killed, stopped, restarted, cut
    off and lied to, and check every token of every answer.

    Exits with 1 when a request hangs, is answered wrongly, leaves a block behind, or fails though
    the router could have recovered it.
    """
    try:
        from pd_grpc.bench.endurance.soak import faults_of
        from pd_grpc.bench.endurance.soak import soak as run
        from pd_grpc.bench.processes import WorkerLost
    except ModuleNotFoundError as error:
        say_error(f"pd-grpc soak: it needs {error.name}: pip install 'pd-grpc[bench]'")
        raise typer.Exit(EXIT_USAGE) from error
    try:
        with progress("soak") as tell:
            report = asyncio.run(run(requests, seed, tell))
    except WorkerLost as error:
        say_error(str(error))
        raise typer.Exit(EXIT_FAILED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    stdout.print(_table(report))
    if wrong := faults_of(report):
        say_error("; ".join(wrong))
        raise typer.Exit(EXIT_FAILED)


def _table(report: dict[str, Any]) -> Table:
    table = Table("figure", "value")
    for name in _FIGURES:
        value = report[name]
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    return table
