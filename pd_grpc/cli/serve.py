"""`pd-grpc serve prefill|decode|router`: one server in this process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

import typer

from pd_grpc.cli.settings import ROLES, is_help, settings_help

EXIT_NOT_INSTALLED = 2

_LAST_ANSWERS_S = 3.0
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

serve = typer.Typer(
    no_args_is_help=True,
    help="Run one server. Each takes its settings from flags, PD_* variables and a TOML file; "
    "`pd-grpc serve prefill --help` lists them.",
)


@serve.callback()
def options(
    exit_with_stdin: bool = typer.Option(
        False, "--exit-with-stdin", hidden=True, help="Stop when standard input ends."
    ),
) -> None:
    """Settings of the process, whatever its role."""
    if exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, name="stdin", daemon=True).start()


@serve.command("prefill", context_settings=_RAW)
def prefill(context: typer.Context) -> None:
    """Reads prompts and hands their KV cache over."""
    raise typer.Exit(_run("prefill", context.args))


@serve.command("decode", context_settings=_RAW)
def decode(context: typer.Context) -> None:
    """Generates from the KV caches it is handed."""
    raise typer.Exit(_run("decode", context.args))


@serve.command("router", context_settings=_RAW)
def router(context: typer.Context) -> None:
    """Takes clients' requests and pairs prefill with decode."""
    raise typer.Exit(_run("router", context.args))


def _run(role: str, argv: Sequence[str]) -> int:
    if is_help(argv):
        # What a server needs may not be installed.
        print(settings_help(ROLES[role]))
        return 0
    try:
        server = importlib.import_module(f"pd_grpc.servers.{role}")
    except ModuleNotFoundError as error:
        need = f"it needs {error.name}: pip install 'pd-grpc[all]'"
        print(f"pd-grpc serve {role}: {need}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    status: int = server.main(argv)
    return status


def _exit_with_stdin() -> None:
    """Standard input is a pipe held by the process that started this one: when it ends, so does
    this. There is no one left to drain for, so the second signal comes soon after the first."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    for signum in (signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), signum)
        threading.Event().wait(_LAST_ANSWERS_S)
    os._exit(1)
