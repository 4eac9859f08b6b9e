"""`pd-grpc conformance`: judge any implementation of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer

from pd_grpc.cli.console import EXIT_FAILED, describe, refuse, say_error, stderr, stdout
from pd_grpc.cli.judging import Places, Run, role_of
from pd_grpc.conformance.case import Broken, Case, Cases, answers_within
from pd_grpc.conformance.report import as_table, explained, unsteady
from pd_grpc.conformance.results_file import CannotWrite, ResultsFile
from pd_grpc.conformance.run import Result
from pd_grpc.protocol.endpoints import PortInUse, check_endpoint
from pd_grpc.protocol.rpc import read_error

_DEFAULT = Places()


def _endpoint_option(text: str, default: str = "") -> Any:
    return typer.Option(metavar="H:P", help=text, show_default=default or False)


def conformance(
    decode: Annotated[str, _endpoint_option("Control endpoint of a D to judge.")] = "",
    prefill: Annotated[str, _endpoint_option("Control endpoint of a P to judge.")] = "",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="With --prefill: address of this machine at which the subject reaches the kit.",
            show_default=_DEFAULT.host,
        ),
    ] = None,
    router: Annotated[
        str,
        _endpoint_option("A router to judge, started with the next three as its only instances."),
    ] = "",
    as_prefill: Annotated[
        str | None,
        _endpoint_option("With --router: where the kit is the P behind it.", _DEFAULT.prefill),
    ] = None,
    as_decode: Annotated[
        str | None,
        _endpoint_option("With --router: where the kit is the D behind it.", _DEFAULT.decode),
    ] = None,
    as_alternate: Annotated[
        str | None,
        _endpoint_option(
            "With --router: where the kit is another D behind it; empty for none, and no cases of "
            "Placing.",
            _DEFAULT.alternate,
        ),
    ] = None,
    more_cases: Annotated[
        list[str] | None,
        typer.Option(
            "--cases",
            metavar="MODULE",
            help="Run the CASES of this module too, before the kit's own; repeatable.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE", help="Run this case, or those whose number begins so; repeatable."
        ),
    ] = None,
    answer_s: Annotated[
        float,
        typer.Option(
            min=0.1, help="How long anything may take that the protocol gives no time of its own."
        ),
    ] = 5.0,
    tries: Annotated[
        int,
        typer.Option(
            min=1,
            help="Run a case that fails again, up to so many times in all: on a machine that is "
            "busy enough to miss the times that the subject announces.",
        ),
    ] = 1,
) -> None:
    """Drive an implementation through every case of the conformance kit.

    The subject must serve nobody else meanwhile, and its last cases, such as D950 and those after
    it, leave it drained. Exits with 1 when a case fails.
    """
    role, endpoint = _subject({"decode": decode, "prefill": prefill, "router": router})
    _belongs("prefill", role, {"--listen": listen})
    kit = {"--as-prefill": as_prefill, "--as-decode": as_decode, "--as-alternate": as_alternate}
    _belongs("router", role, kit)
    places = Places(
        _DEFAULT.host if listen is None else listen,
        _place("--as-prefill", as_prefill, _DEFAULT.prefill),
        _place("--as-decode", as_decode, _DEFAULT.decode),
        _place("--as-alternate", as_alternate, _DEFAULT.alternate) if as_alternate != "" else "",
    )
    run = Run(role, endpoint, _chosen(_all_cases(role, more_cases or ()), only or ()), tries)
    run.heard.append(_tell_progress)
    file = None if json_file is None else _begun(json_file, run)
    answers_within(answer_s)
    _judge(run, places, file)
    _tell(run)
    if run.stopped_by is not None:
        raise typer.Exit(128 + run.stopped_by)
    if any(result.passed is False for result in run.results):
        raise typer.Exit(EXIT_FAILED)


# --- judging -------------------------------------------------------------------------------------


def _judge(run: Run, places: Places, file: ResultsFile | None) -> None:
    """Run the cases, and write down what comes of each as it does."""
    try:
        asyncio.run(run.judge(places))
        if file is not None:
            file.close(run.about, run.results, interrupted=run.stopped_by is not None)
    except CannotWrite as why:
        _give_up(f"--json {why}", why)
    except Broken as why:
        _give_up(f"{run.endpoint} cannot be judged: {why}", why)
    except PortInUse as why:
        _give_up(str(why), why)
    except grpc.RpcError as error:
        _give_up(describe(read_error(error), run.endpoint), error)


def _give_up(message: str, why: Exception) -> NoReturn:
    say_error(message)
    raise typer.Exit(EXIT_FAILED) from why


# --- telling -------------------------------------------------------------------------------------


def _tell(run: Run) -> None:
    """The table, why each case failed that did, and the counts."""
    # Where nobody reads any more, as after `| head -1`, rich would end the process with 1.
    with contextlib.suppress(SystemExit):
        stdout.print(as_table(run.results))
        for result in run.results:
            if result.passed is False:
                stdout.print(explained(result), markup=False, soft_wrap=True)
        for line in unsteady(run.results):
            stdout.print(line, markup=False, soft_wrap=True)
        stdout.print(_summary(run))


def _tell_progress(result: Result) -> None:
    """One line as each case ends, where somebody looks."""
    if stderr.is_terminal:
        word = {True: "passed", False: "FAILED", None: "n/a"}[result.passed]
        stderr.print(f"{result.id} {word} {result.seconds:.2f} s")


def _summary(run: Run) -> str:
    counts = [sum(r.passed is outcome for r in run.results) for outcome in (True, False, None)]
    took = sum(r.seconds for r in run.results)
    cases = "1 case" if len(run.results) == 1 else f"{len(run.results)} cases"
    if run.stopped_by is not None:
        cases = f"interrupted: {len(run.results)} of {len(run.cases)} cases"
    text = f"{cases} in {took:.1f} s: {counts[0]} passed, {counts[1]} failed"
    return text + (f", {counts[2]} do not apply" if counts[2] else "")


# --- what the call means -------------------------------------------------------------------------


def _subject(endpoints: dict[str, str]) -> tuple[str, str]:
    """The one role for which an endpoint is given, and that."""
    given = [role for role, endpoint in endpoints.items() if endpoint]
    options = ", ".join(f"--{role}" for role in endpoints)
    if len(given) != 1:
        refuse(f"give exactly one of {options}")
    (role,) = given
    return role, _endpoint(f"--{role}", endpoints[role])


def _belongs(to: str, role: str, options: dict[str, str | None]) -> None:
    """Refuse options of one role when another is judged."""
    for option, value in options.items():
        if value is not None and role != to:
            refuse(f"{option} goes with --{to}, not with --{role}")


def _place(option: str, given: str | None, default: str) -> str:
    return default if given is None else _endpoint(option, given)


def _endpoint(option: str, value: str) -> str:
    try:
        return check_endpoint(value)
    except ValueError as error:
        refuse(f"{option} {error}")


def _begun(path: Path, run: Run) -> ResultsFile:
    """The file that has what the run has come to, from now on."""
    try:
        file = ResultsFile(path)
        file.write(run.about, run.results)
    except CannotWrite as why:
        refuse(f"--json {why}")
    run.heard.append(lambda result: file.write(run.about, run.results))
    return file


def _all_cases(role: str, modules: Sequence[str]) -> list[Case[Any]]:
    """The cases of modules, then the kit's own, the last of which may leave the subject drained."""
    try:
        own = role_of(role).cases
    except ModuleNotFoundError as error:
        refuse(f"pd-grpc conformance: it needs {error.name}: pip install 'pd-grpc[server]'")
    cases = [case for module in modules for case in _cases_of(module)] + [*own]
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            refuse(f"--cases: there are two cases {case.id}")
        seen.add(case.id)
    return cases


def _cases_of(module: str) -> Cases[Any]:
    # A module in the folder one is in is found, as it is by `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        refuse(f"--cases {module}: {error}")
    cases = getattr(found, "CASES", None)
    if not isinstance(cases, Cases):
        refuse(f"--cases {module}: CASES must be a pd_grpc.conformance.Cases")
    return cases


def _chosen(cases: Sequence[Case[Any]], only: Sequence[str]) -> list[Case[Any]]:
    wanted = [name.upper() for name in only]
    for name in wanted:
        if not any(case.id.startswith(name) for case in cases):
            refuse(f"--only {name}: there is no such case")
    return [c for c in cases if not wanted or any(c.id.startswith(name) for name in wanted)]
