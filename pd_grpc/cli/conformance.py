"""`pd-grpc conformance`: judge any implementation of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from pd_grpc.cli.console import EXIT_FAILED, describe, refuse, say_error, stderr, stdout
from pd_grpc.conformance.case import Broken, Case, Cases, answers_within
from pd_grpc.conformance.decode import DECODE_CASES, open_decode
from pd_grpc.conformance.prefill import PREFILL_CASES, open_prefill
from pd_grpc.conformance.report import as_object, as_table, explained
from pd_grpc.conformance.router import ROUTER_CASES, open_instances, open_router
from pd_grpc.conformance.run import Result, run_cases
from pd_grpc.protocol.endpoints import PortInUse, check_endpoint
from pd_grpc.protocol.rpc import read_error


@dataclass(frozen=True)
class _Places:
    """Where a subject finds the kit: the host at which a P finds its Ds, and the endpoints of the
    instances behind a router."""

    host: str
    prefill: str
    decode: str
    alternate: str


@contextlib.asynccontextmanager
async def _meet_router(endpoint: str, places: _Places) -> AsyncIterator[Any]:
    behind = (places.prefill, places.decode, places.alternate)
    async with open_instances(*behind) as instances, open_router(endpoint, instances) as subject:
        yield subject


@dataclass(frozen=True)
class _Role:
    """What can be judged: its cases, and how to meet a subject at an endpoint."""

    cases: Cases[Any]
    meet: Callable[[str, _Places], AbstractAsyncContextManager[Any]]


_ROLES = {
    "decode": _Role(DECODE_CASES, lambda endpoint, places: open_decode(endpoint)),
    "prefill": _Role(PREFILL_CASES, lambda endpoint, places: open_prefill(endpoint, places.host)),
    "router": _Role(ROUTER_CASES, _meet_router),
}


def conformance(
    decode: Annotated[
        str, typer.Option(metavar="H:P", help="Control endpoint of a D to judge.")
    ] = "",
    prefill: Annotated[
        str, typer.Option(metavar="H:P", help="Control endpoint of a P to judge.")
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address of this machine at which the subject reaches the kit."
        ),
    ] = "127.0.0.1",
    router: Annotated[
        str,
        typer.Option(
            metavar="H:P",
            help="A router to judge, started with the next three as its only instances.",
        ),
    ] = "",
    as_prefill: Annotated[
        str, typer.Option(metavar="H:P", help="Where the kit is the P behind the router.")
    ] = "127.0.0.1:50071",
    as_decode: Annotated[
        str, typer.Option(metavar="H:P", help="Where the kit is the D behind the router.")
    ] = "127.0.0.1:50072",
    as_alternate: Annotated[
        str,
        typer.Option(
            metavar="H:P",
            help="Where the kit is another D behind the router; empty for none, and no cases of "
            "Placing.",
        ),
    ] = "127.0.0.1:50073",
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
) -> None:
    """Drive an implementation through every case of the conformance kit.

    The subject must serve nobody else meanwhile. Exits with 1 when a case fails.
    """
    role, endpoint = _subject({"decode": decode, "prefill": prefill, "router": router})
    places = _Places(
        listen,
        _endpoint("--as-prefill", as_prefill),
        _endpoint("--as-decode", as_decode),
        _endpoint("--as-alternate", as_alternate) if as_alternate else "",
    )
    cases = _chosen(_ROLES[role].cases, only or ())
    answers_within(answer_s)
    try:
        subject, results = asyncio.run(_judge(role, endpoint, places, cases))
    except Broken as why:
        say_error(f"{endpoint} cannot be judged: {why}")
        raise typer.Exit(EXIT_FAILED) from why
    except PortInUse as why:
        say_error(str(why))
        raise typer.Exit(EXIT_FAILED) from why
    except grpc.RpcError as error:
        say_error(describe(read_error(error), endpoint))
        raise typer.Exit(EXIT_FAILED) from error
    if json_file is not None:
        json_file.write_text(json.dumps(as_object(subject, results), indent=1) + "\n")
    failed = [result for result in results if result.passed is False]
    stdout.print(as_table(results))
    for result in failed:
        stdout.print(explained(result), markup=False, soft_wrap=True)
    stdout.print(_summary(results))
    if failed:
        raise typer.Exit(EXIT_FAILED)


async def _judge(
    role: str, endpoint: str, places: _Places, cases: Sequence[Case[Any]]
) -> tuple[dict[str, Any], list[Result]]:
    async with _ROLES[role].meet(endpoint, places) as subject:
        results = await run_cases(subject, cases, _tell)
        about = {
            "role": role,
            "endpoint": endpoint,
            "name": subject.instance.name,
            "model": subject.info.model,
        }
        return about, results


def _tell(result: Result) -> None:
    """One line as each case ends, where somebody looks."""
    if stderr.is_terminal:
        word = {True: "passed", False: "FAILED", None: "n/a"}[result.passed]
        stderr.print(f"{result.id} {word} {result.seconds:.2f} s")


def _chosen(cases: Cases[Any], only: Sequence[str]) -> list[Case[Any]]:
    wanted = [name.upper() for name in only]
    for name in wanted:
        if not any(case.id.startswith(name) for case in cases):
            refuse(f"--only {name}: there is no such case")
    return [c for c in cases if not wanted or any(c.id.startswith(name) for name in wanted)]


def _subject(endpoints: dict[str, str]) -> tuple[str, str]:
    """The one role for which an endpoint is given, and that."""
    given = [role for role, endpoint in endpoints.items() if endpoint]
    options = ", ".join(f"--{role}" for role in endpoints)
    if len(given) != 1:
        refuse(f"give exactly one of {options}")
    (role,) = given
    return role, _endpoint(f"--{role}", endpoints[role])


def _endpoint(option: str, value: str) -> str:
    try:
        return check_endpoint(value)
    except ValueError as error:
        refuse(f"{option} {error}")


def _summary(results: Sequence[Result]) -> str:
    counts = [sum(r.passed is outcome for r in results) for outcome in (True, False, None)]
    took = sum(r.seconds for r in results)
    text = f"{len(results)} cases in {took:.1f} s: {counts[0]} passed, {counts[1]} failed"
    return text + (f", {counts[2]} do not apply" if counts[2] else "")
