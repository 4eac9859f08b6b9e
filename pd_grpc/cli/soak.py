"""`pd-grpc soak`: whether a system keeps its promises while everything in it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_grpc.cli.console import refuse

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
    "undetected",
    "stall_max_s",
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
    the router could have recovered it; when the router does not notice what it ought to, or memory
    grows with the requests.
    """
    try:
        from pd_grpc.bench.endurance.soak import faults_of
        from pd_grpc.bench.endurance.soak import soak as run
        from pd_grpc.cli.long_run import carry_out
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc soak: it needs {error.name}: pip install 'pd-grpc[bench]'")
    carry_out("soak", lambda tell: run(requests, seed, tell), json_file, _FIGURES, faults_of)
