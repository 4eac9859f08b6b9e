"""What the three servers' processes have in common: configuration, signals, exit statuses."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TextIO, TypeVar

from pd_grpc.cli.settings import SettingsError, load_settings
from pd_grpc.engine.model_error import ModelError
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, ServerConfig
from pd_grpc.protocol.rpc import PortInUse
from pd_grpc.servers.allocator import keep_freed_memory
from pd_grpc.servers.onednn import bound_primitives
from pd_grpc.servers.openmp import wait_as_fits
from pd_grpc.telemetry.exporting import Telemetry, make_telemetry
from pd_grpc.telemetry.logs import LOGGER, LineHandler, configure_logging
from pd_grpc.transport.registry import UnknownTransport

_log = logging.getLogger(f"{LOGGER}.servers")

EXIT_CONFIGURATION = 2
EXIT_PORT_IN_USE = 3
EXIT_FORCED = 4

STOP_MARGIN_S = 2.0
"""What a stop may take beyond its last calls, which end within `call_s`, before the process ends
without it: nothing is in flight by then, and only a step of the engine can last longer."""

C = TypeVar("C", bound=ServerConfig)
T = TypeVar("T")


class Server(Protocol):
    """A running instance."""

    @property
    def name(self) -> str: ...

    @property
    def endpoint(self) -> str: ...

    def drain(self, deadline_s: float | None = None) -> int:
        """Take nothing new and finish what runs; returns what is in flight."""
        ...

    async def drained(self) -> None:
        """Wait until a drain, whoever asked for it, has nothing left to finish."""
        ...

    async def stop(self) -> None:
        """End everything now."""
        ...


def run(
    role: str,
    settings: type[C],
    argv: Sequence[str],
    start: Callable[[C, Telemetry], Awaitable[Server]],
) -> int:
    """Serve until a drain has ended or a signal came; returns the exit status.

    SIGTERM and SIGINT drain, a second one ends what runs, a third one does not wait for a step that
    hangs; without it such a step is waited for `call_s` and a little more. 0 after that (4 where a
    step was not waited for), 2 for a configuration or model that cannot be used, 3 for a port in
    use; the reason goes to standard error. Prints `ready ROLE NAME ENDPOINT` on
    standard output once it answers, and before it `metrics ROLE NAME ENDPOINT` where Prometheus is
    answered.
    """
    for stream in (sys.stdout, sys.stderr):
        atexit.register(_let_go, stream)
    try:
        config = load_settings(settings, argv, os.environ)
        keep_freed_memory()
        if isinstance(config, PrefillConfig | DecodeConfig):
            wait_as_fits(os.environ, role, config.threads)
            bound_primitives(os.environ)
        lines = configure_logging(
            config.log_format, config.log_level, instance=config.name or role, everyone=True
        )
        telemetry = _telemetry(role, config)
        if telemetry.prometheus:
            _say(f"metrics {role} {config.name or role} {telemetry.prometheus}", sys.stdout)
        return asyncio.run(_serve(role, config, telemetry, lines, start))
    except (SettingsError, ModelError, UnknownTransport) as error:
        print(f"pd-grpc serve {role}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except PortInUse as error:
        print(f"pd-grpc serve {role}: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE


def _telemetry(role: str, config: ServerConfig) -> Telemetry:
    try:
        return make_telemetry(
            f"pd-grpc-{role}", config.name or role, config.otlp, config.prometheus
        )
    except RuntimeError as error:  # the exporter is not installed
        raise SettingsError(str(error)) from error
    except OSError as error:
        raise PortInUse(f"cannot answer Prometheus at {config.prometheus}: {error}") from error


def progress(line: str) -> None:
    """Say in the log what takes long."""
    _log.info("%s", line)


def _say(line: str, stream: TextIO) -> None:
    """Write a line. That nobody reads any more, or a disk is full, is no reason not to serve."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        atexit.register(_let_go, stream)


def _let_go(stream: TextIO) -> None:
    """What could not be written is no reason to end with a status of its own: the interpreter tries
    once more when it ends, and would end with 120."""
    if stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


async def load(work: Callable[[], T]) -> T:
    """Do what takes long beside the loop, on a thread that ends with it; one of asyncio's own would
    stay for the life of the process."""
    executor = ThreadPoolExecutor(1, "pd-load")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)


async def _serve(
    role: str,
    config: C,
    telemetry: Telemetry,
    lines: LineHandler,
    start: Callable[[C, Telemetry], Awaitable[Server]],
) -> int:
    signals = asked, insisted, forced = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        for event in signals:
            if not event.is_set():
                event.set()
                return

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    starting = asyncio.ensure_future(start(config, telemetry))
    if not await _first_of(starting, asked.wait()):
        # Loading cannot be interrupted; nothing is in flight yet.
        os._exit(0)
    server = starting.result()
    lines.instance = server.name
    _say(f"ready {role} {server.name} {server.endpoint}", sys.stdout)
    await _first_of(server.drained(), asked.wait())
    if asked.is_set():
        server.drain(config.drain_s)
        # The drain ends by its own timer; the margin is for its last answers.
        over = asyncio.wait_for(server.drained(), config.drain_s + 1.0)
        await _first_of(asyncio.gather(over, return_exceptions=True), insisted.wait())
    stopping = asyncio.ensure_future(server.stop())
    in_time = asyncio.wait({stopping}, timeout=config.call_s + STOP_MARGIN_S)
    if not await _first_of(in_time, forced.wait()) or not stopping.done():
        # A step of the engine that hangs cannot be ended otherwise.
        _log.warning("not waiting any longer for what hangs")
        os._exit(EXIT_FORCED)
    stopping.result()
    await asyncio.to_thread(telemetry.shutdown)
    return 0


async def _first_of(wanted: Awaitable[object], other: Awaitable[object]) -> bool:
    """Wait for either; True when `wanted` is done. What `wanted` raises is left in it."""
    first, second = asyncio.ensure_future(wanted), asyncio.ensure_future(other)
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    if first.done():
        return True
    first.cancel()
    return False
