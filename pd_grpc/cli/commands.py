"""The commands of `pd-grpc`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import typer

from pd_grpc.cli.bench import bench
from pd_grpc.cli.bench_serve import serve as bench_serve
from pd_grpc.cli.conformance import conformance
from pd_grpc.cli.explore import explore
from pd_grpc.cli.generate import generate
from pd_grpc.cli.serve import serve
from pd_grpc.cli.soak import soak
from pd_grpc.cli.status import status
from pd_grpc.cli.trace import trace
from pd_grpc.cli.unplug import unplug
from pd_grpc.cli.up import up
from pd_grpc.protocol.version import VERSION

app = typer.Typer(
    name="pd-grpc",
    help="Disaggregated prefill and decode over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.add_typer(serve, name="serve")
app.command()(generate)
app.command()(status)
app.command()(trace)
app.command()(conformance)
app.command()(explore)
app.command()(soak)
bench.command()(unplug)
bench.command("serve")(bench_serve)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pd-grpc {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Disaggregated prefill and decode over gRPC."""
    if context.invoked_subcommand in (
        "generate",
        "status",
        "trace",
        "conformance",
        "explore",
        "soak",
        "bench",
    ):
        # They are interrupted as any program is; up and serve have handlers of their own.
        for signum, handler in (context.obj or {}).items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def run(signals: Mapping[signal.Signals, Any]) -> None:
    """Run the command that the arguments name; `signals` are the handlers it was started with."""
    app(obj=dict(signals))
