"""How the commands speak: progress on a terminal, plain lines elsewhere, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from pd_grpc.protocol.endpoints import check_endpoint
from pd_grpc.protocol.faults import Fault, TransportFault

DEFAULT_ENDPOINT = "127.0.0.1:50050"

EXIT_FAILED = 1
EXIT_USAGE = 2


def refuse(message: str) -> NoReturn:
    """End the command because of how it was called, with one line that says what is wrong."""
    say_error(message)
    raise typer.Exit(EXIT_USAGE)


def _check_endpoint(endpoint: str) -> str:
    try:
        return check_endpoint(endpoint)
    except ValueError as error:
        refuse(f"--endpoint {error}")


Endpoint = typer.Option(
    DEFAULT_ENDPOINT,
    "--endpoint",
    envvar="PD_ENDPOINT",
    callback=_check_endpoint,
    help="host:port of the router.",
)

# Where nobody looks at a screen, tables keep their lines whole. Python has no stdout at all where
# the shell closed it.
_PIPED_WIDTH = 160
_on_screen = sys.stdout is not None and sys.stdout.isatty()

stdout = Console(highlight=False, width=None if _on_screen else _PIPED_WIDTH)
stderr = Console(stderr=True, highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Tells how long work goes on: a line that changes on a terminal, one line a step elsewhere."""
    if not stderr.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with stderr.status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def say_error(message: str) -> None:
    """An error for people, on standard error, without markup."""
    stderr.print(message, style="red", markup=False, soft_wrap=True)


def describe(error: Fault | TransportFault, endpoint: str) -> str:
    """`CODE REASON: message` of a failed call, in one line."""
    if isinstance(error, Fault):
        return " ".join(str(error).splitlines())
    if error.peer_lost:
        return f"{error.code.name}: no answer from {endpoint}: {error.message}"
    return " ".join(str(error).splitlines())
