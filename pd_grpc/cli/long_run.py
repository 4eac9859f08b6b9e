"""What the commands of long runs share: progress, a report as JSON and as a table, a verdict."""

from __future__ import annotations

import asyncio
import contextlib
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
    after: Callable[[Report], None] = lambda report: None,
) -> None:
    """Run `work`, which is told where to report progress, and tell what came of it; exits with 1
    when a process of it is lost, or its report has a fault. `after` gets the report once it is
    written."""
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
        write_report(json_file, report)
    after(report)
    table = Table("figure", "value")
    for name in figures:
        value = report[name]
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    stdout.print(table)
    if wrong := faults_of(report):
        say_error("; ".join(wrong))
        raise typer.Exit(EXIT_FAILED)


def write_report(path: Path, report: Report) -> None:
    """As JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")


class ReportSoFar:
    """What a run has found until its report is written, in `FILE.part` beside it."""

    def __init__(self, json_file: Path | None) -> None:
        self._part = json_file and json_file.with_name(json_file.name + ".part")

    def keep(self, report: Report) -> None:
        """Write it over the last one, where the report is to be written at all."""
        if self._part is not None:
            # A disk that does not take it ends no run: it may take the next.
            with contextlib.suppress(OSError):
                write_report(self._part, report)

    def discard(self) -> None:
        """The report is written."""
        if self._part is not None:
            self._part.unlink(missing_ok=True)


def check_place(path: Path, option: str = "--json") -> None:
    """Refuse a file of `option` that could not be written after all that time."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        refuse(f"{option} {path}: {error.strerror}")


def check_drawing(path: Path | None) -> None:
    """Refuse a `--plot` that could not be drawn after all that time."""
    if path is None:
        return
    from pd_grpc.bench.plot import check_plot
    from pd_grpc.bench.zmq_wire import MissingExtra

    try:
        check_plot(path)
    except ValueError as error:
        refuse(f"--plot {path}: {error}")
    except MissingExtra as error:
        refuse(str(error))
    check_place(path, "--plot")
