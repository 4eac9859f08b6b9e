"""The `pd-grpc` command."""

from __future__ import annotations

import typer

from pd_grpc.cli.generate import generate
from pd_grpc.cli.serve import serve
from pd_grpc.cli.status import status
from pd_grpc.cli.up import up

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

if __name__ == "__main__":
    app()
