"""What the commands of long runs share: progress, a report as JSON and as a table, a verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from pd_grpc.cli.console import EXIT_FAILED, progress, refuse, say_error, stdout

Report = Mapping[str, Any]


def carry_out(
    title: str,
    work: Callable[[Callable[[str], None]], Coroutine[Any, Any, Report]],
    json_file: Path | None,
    figures: Sequence[str],
    faults_of: Callable[[Report], list[str]],
) -> None:
    """Run `work`, which is told where to report progress, and tell what came of it; exits with 1
    when a process of it is lost, or its report has a fault."""
    from pd_grpc.bench.processes import WorkerLost
    from pd_grpc.engine.model_error import ModelError

    if json_file is not None:
        check_place(json_file)
    try:
        with progress(title) as tell:
            report = asyncio.run(work(tell))
    except ModelError as error:
        refuse(str(error))
    except WorkerLost as error:
        say_error(str(error))
        raise typer.Exit(EXIT_FAILED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("figure", "value")
    for name in figures:
        value = report[name]
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    stdout.print(table)
    if wrong := faults_of(report):
        say_error("; ".join(wrong))
        raise typer.Exit(EXIT_FAILED)


def check_place(path: Path) -> None:
    """Refuse a file that could not be written after all that time."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        refuse(f"--json {path}: {error.strerror}")
