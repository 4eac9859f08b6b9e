"""`pd-grpc bench serve`: what clients see of an aggregated deployment and of 1P1D."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_grpc.cli.console import refuse


def serve(
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
        typer.Option(
            metavar="FILE",
            help="Draw times and goodput against the rate; its ending is the format.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every figure within some three minutes, from far less.")
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="R,R,...",
            help="Requests a second, in place of 0.3, 0.6 and 0.9 of what the aggregated "
            "deployment can do, which is then not measured.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that count at each rate.", show_default="32, quick 8"),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Factor on the lengths of the trace.", show_default="0.25, quick 0.1"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Lengths, moments and prompts follow from it.")
    ] = 1,
) -> None:
    """Serve SmolLM2 in bf16 under Poisson arrivals with the lengths of a recorded chat service,
    aggregated and with prefill and decode apart, on the same two cores; and tell what the hand-over
    adds to the time to first token.

    Without --quick it takes some eight minutes and 6 GiB of memory, and wants the machine for
    itself. Exits with 1 when a request fails, or an answer is wrong.
    """
    try:
        from pd_grpc.bench.serve.load import NoFit
        from pd_grpc.bench.serve.plot import plot_serving
        from pd_grpc.bench.serve.run import FIGURES, ServeScope, bench_serve, faults_of
        from pd_grpc.cli.long_run import ReportSoFar, carry_out, check_drawing
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc bench serve: it needs {error.name}: pip install 'pd-grpc[all]'")
    scope = ServeScope.of(quick, rates=_rates(rates), requests=requests, scale=scale, seed=seed)
    check_drawing(plot)
    so_far = ReportSoFar(json_file)

    def finish(report: Mapping[str, Any]) -> None:
        so_far.discard()
        if plot is not None:
            plot_serving(report, plot)

    try:
        carry_out(
            "serve",
            lambda tell: bench_serve(scope, tell, so_far.keep),
            json_file,
            FIGURES,
            faults_of,
            finish,
        )
    except NoFit as error:
        refuse(str(error))


def _rates(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        refuse(f"--rates {text}: must be numbers above 0, divided by commas")
    return rates
