"""The benchmark's processes, from the side of the one that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

ANSWER_S = 30.0
"""How long a process may take to start, to stop, or to answer what needs no time."""
_LINE_BYTES = 1 << 26


class WorkerLost(RuntimeError):
    """A process of the benchmark has ended or does not answer."""


class WorkerProcess:
    """One `pd_grpc.bench.worker`, spoken to in lines."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.about: Mapping[str, Any] = {}
        """What it said when it was ready."""
        self._process = process

    @classmethod
    async def launch(cls, role: str) -> WorkerProcess:
        """Start one, which waits to be told how to be."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pd_grpc.bench.worker",
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            # grpc tells of every connection that a peer closes.
            env={"GRPC_VERBOSITY": "ERROR", **os.environ},
            # A Ctrl-C in the terminal ends the one that starts it, which ends this one.
            start_new_session=True,
        )
        return cls(role, process)

    async def start(self, within_s: float = ANSWER_S, **spec: Any) -> None:
        """Tell it how to be, and wait until it is ready. WorkerLost."""
        self.about = await self._ask(spec, within_s)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def signal(self, signum: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def ended(self) -> None:
        """Wait until it has ended by itself, or by a signal."""
        await self._process.wait()

    @property
    def endpoint(self) -> str:
        """host:port of the control endpoint of a server."""
        return str(self.about["endpoint"])

    async def do(self, command: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Have it do something; its answer. WorkerLost."""
        return await self._ask({"do": command, **arguments}, timeout_s)

    async def stop(self) -> None:
        """Let it end; kill it when it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), ANSWER_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise WorkerLost(f"{self.role} did not end within {ANSWER_S:g} s") from None

    async def _ask(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except asyncio.TimeoutError:
            raise WorkerLost(f"{self.role} did not answer within {timeout_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise WorkerLost(f"{self.role} has ended; standard error says why")
        return json.loads(line)
