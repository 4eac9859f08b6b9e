"""A router with its prefill and decode servers as processes of this machine.

Each child says on its standard output when it is ready, and its end is the end of that pipe: one
`select` waits for both, without polling. Its standard input is a pipe that nobody writes to; its
end tells the child that this process is gone, however it went.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import grpc

from pd_grpc.cli.console import EXIT_FAILED, EXIT_USAGE
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.endpoints import PortInUse, address, check_can_listen, split_address
from pd_grpc.servers.openmp import wait_as_fits

if TYPE_CHECKING:
    from typing_extensions import Self

_READY_S = 30.0
"""How long the router may take to find its instances once they are ready."""
_LAST_ANSWERS_S = 3.0
"""What a server may take beyond its drain before it is killed."""
_TAIL_LINES = 15
_EXIT_PORT_IN_USE = 3
_REFUSALS = (EXIT_USAGE, _EXIT_PORT_IN_USE)
"""Statuses with which a server says in one line why it does not start."""
_ROUTER_SERVICE = "pd_grpc.v1.InferenceService"


class ClusterError(Exception):
    """The cluster cannot start or go on; the message says why, with the last lines of a log.

    `status` is an exit status for the command: that of a server that refused to start (2 for a
    setting or model that cannot be used, 3 for an address it cannot listen on), else 1.
    """

    def __init__(self, message: str, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ClusterPlan:
    """What to start. `flags` go to every prefill and decode server, `router_flags` to the router;
    they take the place of the plan's own."""

    prefill: int = 1
    decode: int = 1
    engine: str = "torch"
    model: str = "smollm2"
    dtype: str = "bfloat16"
    aggregated: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    prometheus: str = ""
    """host:port of the router's metrics; the prefill and then the decode servers have the ports
    behind it. With port 0 each takes a free one; empty is off."""
    drain_s: float = 5.0
    start_s: float = 600.0
    """How long loading the model may take."""

    def engine_flags(self) -> list[str]:
        """Flags of a prefill or decode server. Torch servers share the cores unless told else."""
        flags = ["--engine", self.engine, "--model", self.model, "--dtype", self.dtype]
        if self.engine == "torch":
            flags += ["--threads", str(max(1, _cores() // self.engines))]
        return [*flags, *self.flags]

    def environment(self, role: str, environ: Mapping[str, str]) -> dict[str, str]:
        """What a server's process finds in its environment: `environ`, and how its threads wait
        where the servers have more of them together than there are cores."""
        found = dict(environ)
        threads = self._threads()
        if role != "router" and threads * self.engines > _cores():
            wait_as_fits(found, role, threads, crowded=True)
        return found

    def _threads(self) -> int:
        """torch's, of each engine; 0 where it is not told."""
        flags = self.engine_flags()
        told = [value for name, value in pairwise(flags) if name == "--threads"]
        return int(told[-1]) if told else 0

    @property
    def prefills(self) -> int:
        """Number of prefill servers."""
        return 0 if self.aggregated else self.prefill

    @property
    def engines(self) -> int:
        """Number of processes with an engine."""
        return self.decode + self.prefills

    def metrics_of(self, role: str, number: int = 0) -> str:
        """host:port of the metrics of the server of `role` with this number; empty when off."""
        if not self.prometheus:
            return ""
        host, first = split_address(self.prometheus)
        behind = {"router": 0, "prefill": 1, "decode": 1 + self.prefills}[role] + number
        return address(host, first + behind if first else 0)


@dataclass(eq=False)
class LocalInstance:
    """One server process. `endpoint` is known once it is ready."""

    role: str
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_file: IO[bytes] = field(repr=False)
    endpoint: str = ""
    metrics: str = ""
    """host:port at which it answers Prometheus, if it does."""
    ended: bool = False
    _line: bytes = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def feed(self, data: bytes) -> None:
        """Take what it said on standard output; empty means that it has ended."""
        self.log_file.write(data)
        self.ended = not data
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split()
            if words[:1] == ["ready"] and len(words) == 4:
                self.endpoint = words[3]
            elif words[:1] == ["metrics"] and len(words) == 4:
                self.metrics = words[3]

    def tail(self) -> str:
        """The last lines of its log."""
        self.log_file.flush()
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])

    def refusal(self) -> str:
        """Why it did not start, in its own words; empty when its log does not say."""
        self.log_file.flush()
        begin = f"pd-grpc serve {self.role}: "
        log = self.log.read_text(errors="replace")
        return log.rpartition(begin)[2].strip() if begin in log else ""


class LocalCluster:
    """Starts a plan's processes, watches them, stops them; a context manager.

    `on_progress` hears of each step in a few words.
    """

    def __init__(
        self, plan: ClusterPlan, on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._selector = selectors.DefaultSelector()
        self._folder: Path | None = None
        self._started = False
        self.instances: list[LocalInstance] = []

    @property
    def router_endpoint(self) -> str:
        """host:port of the router."""
        return self._named("router").endpoint

    @property
    def folder(self) -> Path:
        """Where the logs are, a file for each server."""
        assert self._folder is not None
        return self._folder

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name: `router`, `prefill-0`, `decode-0` and so on."""
        return {instance.name: instance.pid for instance in self.instances}

    def start(self) -> None:
        """Start everything and return when the router takes requests. ClusterError if it cannot."""
        plan = self._plan
        try:
            # Before a model is loaded.
            check_can_listen(plan.host, plan.port)
            for metrics in filter(None, self._metrics()):
                check_can_listen(*split_address(metrics))
        except PortInUse as error:
            raise ClusterError(str(error), _EXIT_PORT_IN_USE) from error
        self._folder = Path(tempfile.mkdtemp(prefix="pd-grpc-"))
        for i in range(plan.decode):
            self._spawn("decode", f"decode-{i}", plan.engine_flags(), plan.metrics_of("decode", i))
        for i in range(plan.prefills):
            name = f"prefill-{i}"
            self._spawn("prefill", name, plan.engine_flags(), plan.metrics_of("prefill", i))
        self._until_ready(self.instances)
        router = self._spawn("router", "router", self._router_flags(), plan.metrics_of("router"))
        self._until_ready([router])
        self._until_serving(router)

    def watch(self) -> None:
        """Wait for ever; ClusterError when a server ends."""
        while True:
            self._read(None)

    def stop(self) -> None:
        """Let the router drain, then the others; kill what does not end in time."""
        try:
            for role in ({"router"}, {"prefill", "decode"}):
                running = [i for i in self.instances if i.role in role and not i.ended]
                for instance in running:
                    instance.process.terminate()
                self._until_ended(running, self._plan.drain_s + _LAST_ANSWERS_S)
        finally:
            self._kill()

    def _remove_logs(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._kill()
            self._remove_logs()
            raise
        self._started = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Logs are kept when a server failed, for they say why."""
        self.stop()
        if not isinstance(error, ClusterError):
            self._remove_logs()

    def _router_flags(self) -> list[str]:
        plan = self._plan
        flags = ["--engine", plan.engine, "--model", plan.model, "--port", str(plan.port)]
        for role in ("prefill", "decode"):
            endpoints = [i.endpoint for i in self.instances if i.role == role]
            flags += [f"--{role}", ",".join(endpoints)] if endpoints else []
        if plan.aggregated:
            flags.append("--aggregated")
        return [*flags, *plan.router_flags]

    def _metrics(self) -> list[str]:
        plan = self._plan
        return [
            plan.metrics_of("router"),
            *(plan.metrics_of("prefill", i) for i in range(plan.prefills)),
            *(plan.metrics_of("decode", i) for i in range(plan.decode)),
        ]

    def _spawn(self, role: str, name: str, flags: Sequence[str], metrics: str) -> LocalInstance:
        assert self._folder is not None
        log = self._folder / f"{name}.log"
        log_file = log.open("ab", buffering=0)
        common = ["--name", name, "--host", self._plan.host, "--drain-s", str(self._plan.drain_s)]
        port = [] if role == "router" else ["--port", "0"]
        if metrics:
            port += ["--prometheus", metrics]
        command = [sys.executable, "-m", "pd_grpc.cli.main", "serve", "--exit-with-stdin", role]
        process = subprocess.Popen(
            [*command, *common, *port, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=self._plan.environment(role, os.environ),
            # A Ctrl-C in the terminal is this process's to handle: it stops the router first.
            start_new_session=True,
        )
        instance = LocalInstance(role, name, process, log, log_file)
        self.instances.append(instance)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, instance)
        return instance

    def _until_ready(self, instances: Sequence[LocalInstance]) -> None:
        deadline = time.monotonic() + self._plan.start_s
        waiting = list(instances)
        while waiting:
            names = ", ".join(instance.name for instance in waiting)
            self._on_progress(f"waiting for {names}")
            while not any(instance.endpoint for instance in waiting):
                if not self._read(deadline - time.monotonic()):
                    text = f"{names} not ready within {self._plan.start_s:g} s"
                    raise ClusterError(f"{text}\n{waiting[0].tail()}")
            for instance in [i for i in waiting if i.endpoint]:
                self._on_progress(f"{instance.name} is ready at {instance.endpoint}")
                waiting.remove(instance)

    def _until_serving(self, router: LocalInstance) -> None:
        """Wait on the router's own health until it has found its instances."""
        # A client that is installed without servers has the other commands, and not this package.
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        self._on_progress("waiting for the router to find its instances")
        request = health_pb2.HealthCheckRequest(service=_ROUTER_SERVICE)
        try:
            with rpc.sync_channel(router.endpoint, Timeouts(), Sizes()) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=_READY_S)
                for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        watch.cancel()
                        return
        except grpc.RpcError as error:
            fault = rpc.read_error(error)
            self._read(0)  # a server that has ended says more than the broken watch
            raise ClusterError(f"the router does not serve: {fault}\n{router.tail()}") from error

    def _read(self, timeout: float | None) -> bool:
        """Wait for news of any server. False when there is none in time; ClusterError when one has
        ended."""
        events = self._selector.select(None if timeout is None else max(0.0, timeout))
        for key, _ in events:
            instance: LocalInstance = key.data
            self._take(instance)
            if instance.ended:
                raise self._end_of(instance)
        return bool(events)

    def _end_of(self, instance: LocalInstance) -> ClusterError:
        status = instance.process.wait()
        if not self._started and status in _REFUSALS and (why := instance.refusal()):
            return ClusterError(f"{instance.name}: {why}", status)
        text = f"{instance.name} (pid {instance.pid}) has ended, {_meaning(status)}"
        end = f"the end of its log:\n{instance.tail()}"
        kept = f"\nthe logs are kept in {self._folder}" if self._started else ""
        return ClusterError(f"{text}; {end}{kept}")

    def _take(self, instance: LocalInstance) -> None:
        assert instance.process.stdout is not None
        instance.feed(os.read(instance.process.stdout.fileno(), 65536))
        if instance.ended:
            self._selector.unregister(instance.process.stdout)

    def _until_ended(self, instances: Iterable[LocalInstance], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while any(not i.ended for i in instances):
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                return
            for key, _ in events:
                self._take(key.data)

    def _kill(self) -> None:
        for instance in self.instances:
            process = instance.process
            if process.poll() is None and not instance.ended:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            instance.ended = True
            instance.log_file.close()
        self._selector.close()

    def _named(self, name: str) -> LocalInstance:
        return next(instance for instance in self.instances if instance.name == name)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meaning(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
