"""`pd-grpc bench unplug`: what a stream notices when a machine dies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_grpc.cli.console import refuse
from pd_grpc.cli.up import EngineName

_FIGURES = (
    "streams",
    "broken_streams",
    "wrong_tokens",
    "leaked_blocks",
    "leaked_transfers",
    "gap_p50_s",
    "gap_p99_s",
    "gap_max_s",
    "tokens",
    "killed",
    "recovered_by_retry",
    "recovered_by_continuation",
    "took_s",
)


def unplug(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="sim: 200 streams, a kill every 3 s. torch: 8 streams of SmolLM2 in fp32 with a "
            "kill every 15 s, against what a decode server answers that is asked alone."
        ),
    ] = EngineName.SIM,
    quick: Annotated[
        bool, typer.Option("--quick", help="30 s in place of 5 minutes; torch 60 s.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(metavar="S", min=0, help="Who is killed and what is asked follow from it."),
    ] = 1,
) -> None:
    """Kill one of two prefill and two decode servers after another under streams that go on.

    Exits with 1 when a stream breaks, has a wrong token, is silent for too long, or leaves a block
    behind.
    """
    try:
        from pd_grpc.bench.endurance.unplug import UnplugScope, faults_of
        from pd_grpc.bench.endurance.unplug import unplug as run
        from pd_grpc.cli.long_run import carry_out
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc bench unplug: it needs {error.name}: pip install 'pd-grpc[bench]'")
    scope = UnplugScope.of(engine.value, quick, seed)
    carry_out("unplug", lambda tell: run(scope, tell), json_file, _FIGURES, faults_of)
