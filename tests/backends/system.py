"""`pd-grpc up` as a process, on the sim engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cli.running import COMMAND

_STOP_S = 30.0


@dataclass(frozen=True)
class RunningSystem:
    """What was started. `endpoint` is the router's host:port."""

    endpoint: str
    process: subprocess.Popen[str]
    logs: Path

    def servers(self) -> list[psutil.Process]:
        """The processes of the router, prefill and decode servers."""
        return list(psutil.Process(self.process.pid).children())

    def log(self) -> str:
        """Everything that the servers have logged."""
        return "".join(each.read_text() for each in sorted(self.logs.glob("pd-grpc-*/*.log")))


@contextmanager
def running_up(logs: Path, *flags: str, **environ: str) -> Iterator[RunningSystem]:
    """`pd-grpc up` with these flags and variables, its logs below `logs`; stopped at the end."""
    errors = logs / "up.stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "up", "--engine", "sim", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(logs), **environ},
        )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ask "):
                break
        else:
            raise AssertionError(f"it does not start: {said} {errors.read_text()}")
        yield RunningSystem(line.split()[1].rstrip(";"), process, logs)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
