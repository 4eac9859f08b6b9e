"""`pd-grpc explore`: what P, D and the router do in every order of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pd_grpc.cli.console import EXIT_FAILED, progress, refuse, stdout
from pd_grpc.cli.long_run import check_place


def explore(
    states: Annotated[
        int, typer.Option(metavar="N", min=0, help="Distinct states to search, at most.")
    ] = 1_600_000,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, help="How long the search may take.")
    ] = 3600.0,
    walks: Annotated[
        int, typer.Option(metavar="N", min=0, help="Random walks after the search.")
    ] = 1000,
    seed: Annotated[
        int, typer.Option(metavar="S", min=0, help="Seed of the first walk; each next is one more.")
    ] = 1,
    faults: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most faults on one path of the search.")
    ] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
    ] = None,
) -> None:
    """Let two prefills, two decodes and two routed requests meet every order of deliver, lose,
    repeat, delay, corrupt, freeze, crash, restart and drain, in one thread and virtual time.

    Exits with 1 when an invariant does not hold, with the list of events that leads there.
    """
    try:
        from pd_grpc.testing.explore import explore as run
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc explore: it needs {error.name}: pip install 'pd-grpc[server]'")
    if json_file is not None:
        check_place(json_file)
    with progress("explore") as tell:
        report = run(states, seconds, walks, seed, most_faults=faults, tell=tell)
    for line in report.lines():
        stdout.print(line, markup=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if report.found:
        raise typer.Exit(EXIT_FAILED)
