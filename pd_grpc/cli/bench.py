"""`pd-grpc bench`: what preparing, moving KV, telemetry, loading and the engine cost, beside what
they are compared with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pd_grpc.cli.console import EXIT_FAILED, EXIT_USAGE, progress, refuse, say_error, stdout
from pd_grpc.cli.up import DtypeName
from pd_grpc.servers.onednn import bound_primitives

if TYPE_CHECKING:
    from pd_grpc.bench.scope import Scope

_NEEDS = ("psutil", "zmq", "matplotlib")

_Report = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
]
_InAMinute = Annotated[
    bool, typer.Option("--quick", help="Every figure within a minute, from far less.")
]
_Dtype = Annotated[DtypeName, typer.Option(help="Of weights and KV.")]
_Threads = Annotated[int, typer.Option(min=0, help="Of torch; 0 leaves its own default.")]

bench = typer.Typer(no_args_is_help=True, help="Measure over real processes on this machine.")


@bench.command()
def prepare(
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the figures as JSON; until all are there, those so far to FILE.part.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw requests done against time, a line per row; its ending is the format.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every figure within two minutes, from far less.")
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Runs of each row.", show_default="5, quick 1")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=4.0,
            help="Factor on the step times of the seed workload; the larger, the less a busy "
            "machine disturbs it.",
            show_default="0.5, quick 0.2",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="azure_llm_2023_conv.csv or one of its form; without it, ten minutes of it that "
            "come with the package.",
        ),
    ] = None,
) -> None:
    """Compare the prepare pool with how systems of this kind prepare today.

    Without --quick it takes more than an hour, and wants the machine for itself.
    """
    _check_extra()
    from pd_grpc.bench.prepare import bench_prepare
    from pd_grpc.bench.results import NoPlace, Results
    from pd_grpc.bench.scope import Scope
    from pd_grpc.bench.trace import NoTrace, read_trace

    scope = Scope.fast(trace) if quick else Scope(trace=trace)
    if repeats is not None:
        scope = replace(scope, repeats=repeats)
    if scale is not None:
        scope = replace(scope, seed_scale=scale)
    try:
        read_trace(trace, scope.trace_minutes)
        results = Results(json_file, plot, _title(scope))
    except (NoTrace, NoPlace) as error:
        refuse(str(error))
    try:
        _run("bench", lambda tell: bench_prepare(scope, tell, results.keep))
    finally:
        # Of a run that failed or was interrupted too.
        if results.figures:
            stdout.print(_table(results.figures))
            if results.part is not None and not results.figures["complete"]:
                say_error(f"the run is not complete; what it has found is in {results.part}")
    try:
        results.complete()
    except OSError as error:
        say_error(f"--json {json_file}: {error.strerror}")
        raise typer.Exit(EXIT_FAILED) from error


@bench.command()
def telemetry(
    json_file: _Report = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every figure within a few minutes, from far less.")
    ] = False,
    headline: Annotated[
        bool, typer.Option("--headline", help="The workload of the headline alone, in full.")
    ] = False,
) -> None:
    """Compare the throughput of servers that are not observed with that of servers that export
    every request, one in a hundred, or keep their last traces in memory.

    Without --quick it takes about fifteen minutes. Exits with 1 when a request is answered wrongly.
    """
    try:
        from pd_grpc.bench.telemetry import FIGURES, TelemetryScope, bench_telemetry, faults_of
        from pd_grpc.cli.long_run import carry_out
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc bench telemetry: it needs {error.name}: pip install 'pd-grpc[all]'")
    if quick and headline:
        refuse("--quick and --headline exclude each other")
    scope = TelemetryScope.of(quick, headline)
    carry_out("telemetry", lambda tell: bench_telemetry(scope, tell), json_file, FIGURES, faults_of)


@bench.command()
def kv(
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the report as JSON; until it is complete, what there is so far to "
            "FILE.part.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw rates against amounts; its ending is the format."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every figure within some minutes, from far less.")
    ] = False,
) -> None:
    """Compare the ways to move KV between processes with memcpy, a socket, ZeroMQ and bare gRPC,
    and tell what KV that lands costs a D that decodes.

    Without --quick it takes up to 20 minutes and 12 GiB of memory, and wants the machine for
    itself: nine rounds of every amount from 1 MiB to 1 GiB, or as many as are begun within 13
    minutes, but three at the least; then some four minutes beside a D that decodes. A part that
    fails is named in the report, which has the others. Exits with 1 when a part has failed, or a
    block is not what was sent.
    """
    _check_extra("torch")
    from pd_grpc.bench.kv.figures import FIGURES
    from pd_grpc.bench.kv.plot import plot_rates
    from pd_grpc.bench.kv.run import KvScope, bench_kv, faults_of
    from pd_grpc.cli.long_run import ReportSoFar, carry_out, check_drawing

    check_drawing(plot)
    scope, so_far = KvScope.of(quick), ReportSoFar(json_file)

    def finish(report: Mapping[str, Any]) -> None:
        so_far.discard()
        if plot is not None:
            plot_rates(report, plot)

    carry_out(
        "kv",
        lambda tell: bench_kv(scope, tell, so_far.keep),
        json_file,
        FIGURES,
        faults_of,
        finish,
    )


@bench.command()
def engine(
    json_file: _Report = None,
    quick: _InAMinute = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each case.", show_default="7, quick 3")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Hugging Face folder, hub name or GGUF file.")
    ] = "smollm2",
    dtype: _Dtype = DtypeName.BFLOAT16,
    threads: _Threads = 0,
) -> None:
    """Compare the torch engine with plain transformers, in one process and turn by turn.

    Decoding at batch 1, 4 and 16 and with prompts of mixed length, and prefill. Without --quick it
    takes some five minutes, and wants the machine for itself. Exits with 1 when a float32 answer is
    not that of transformers.
    """
    _check_extra("torch", "transformers")
    from pd_grpc.bench.engine.figures import FIGURES
    from pd_grpc.bench.engine.run import EngineScope, bench_engine, faults_of
    from pd_grpc.cli.long_run import carry_out

    scope = EngineScope.of(quick)
    scope = replace(scope, model=model, dtype=dtype.value, threads=threads)
    if rounds is not None:
        scope = replace(scope, rounds=rounds)
    # As servers have it. What follows is the first to use torch.
    bound_primitives(os.environ)
    carry_out("engine", lambda tell: bench_engine(scope, tell), json_file, FIGURES, faults_of)


@bench.command()
def load(
    json_file: _Report = None,
    quick: _InAMinute = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Loads of each way.", show_default="5, quick 2")
    ] = None,
    model: Annotated[str, typer.Option(help="GGUF file, or smollm2.")] = "smollm2",
    dtype: _Dtype = DtypeName.BFLOAT16,
    threads: _Threads = 0,
) -> None:
    """Tell how long a model takes to load from safetensors and from GGUF, with its weights in the
    cache and without, and how much memory at the most. Each load is a process of its own. Linux.

    Without --quick it takes some two minutes, and wants the machine for itself. Exits with 1 when a
    load fails, or its peak cannot be told from what was before.
    """
    _check_extra("torch", "transformers", "gguf")
    from pd_grpc.bench.load.figures import FIGURES
    from pd_grpc.bench.load.run import LoadScope, bench_load, faults_of
    from pd_grpc.cli.long_run import carry_out

    scope = replace(LoadScope.of(quick), model=model, dtype=dtype.value, threads=threads)
    if rounds is not None:
        scope = replace(scope, rounds=rounds)
    carry_out("load", lambda tell: bench_load(scope, tell), json_file, FIGURES, faults_of)


@bench.command()
def calibrate(
    by_runs: Annotated[
        bool, typer.Option("--by-runs", help="Measure the serial row in place of reckoning it.")
    ] = False,
) -> None:
    """Fit the one free parameter of the seed workload's step times (docs/prepare.md) to its row
    zmq_serial.

    The constant FLOOR_MS in pd_grpc/bench/scope.py is what it prints.
    """
    if by_runs:
        _check_extra()
    from pd_grpc.bench.calibrate import measure, reckon
    from pd_grpc.bench.scope import Scope

    found = _run("calibrate", lambda tell: (measure if by_runs else reckon)(Scope(), tell))
    stdout.print(f"floor_ms {found.floor_ms:.2f}: the serial row takes {found.serial_s:.1f} s")


def _run(title: str, work: Any) -> Any:
    """What `work`, told where to report progress, returns; exits when an experiment fails."""
    from pd_grpc.bench.calibrate import NoFit
    from pd_grpc.bench.processes import WorkerLost
    from pd_grpc.bench.seed_run import RequestsFailed
    from pd_grpc.bench.system import BlocksLost

    try:
        with progress(title) as tell:
            return asyncio.run(work(tell))
    except (NoFit, WorkerLost, RequestsFailed, BlocksLost) as error:
        say_error(str(error))
        raise typer.Exit(EXIT_FAILED) from error


def _check_extra(*more: str) -> None:
    from pd_grpc.bench.zmq_wire import MissingExtra, load

    try:
        for module in (*_NEEDS, *more):
            load(module)
    except MissingExtra as error:
        say_error(str(error))
        raise typer.Exit(EXIT_USAGE) from error


def _title(scope: Scope) -> str:
    return (
        f"1P1D, {scope.seed_requests:,} requests, {scope.seed_at_once} at once, "
        f"{scope.seed_input:,} tokens in and {scope.seed_output} out, "
        f"time scale {scope.seed_scale:g}"
    )


def _table(figures: dict[str, Any]) -> Table:
    from pd_grpc.bench.setup import Row
    from pd_grpc.bench.targets import TARGETS

    table = Table("figure", "value", "95% interval", "target", "met")
    names = [f"{row.value}_s" for row in Row] + ["threads5_prediction_error"]
    targets = {target.figure: target for target in TARGETS}
    for name in [*names, *targets]:
        if name not in figures:
            continue
        low, high = figures.get(f"{name}_interval", (None, None))
        interval = "" if low is None else f"{low:.3f} to {high:.3f}"
        target = targets.get(name)
        met = "" if target is None else ("yes" if target.met(figures[name]) else "NO")
        table.add_row(name, f"{figures[name]:.3f}", interval, str(target or ""), met)
    return table
