"""Prefill and decode servers in processes of their own, that write by NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.prefill.cluster import SMALL

START_S = 60.0
_SHARED = ("block_size", "chunk_tokens", "heartbeat_s", "lease_s", "grace_s")


def freeze(pid: int) -> None:
    """Stop a child process. Until the last of its threads has stopped it might take a write in."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@dataclass
class ServerProcess:
    """Its process, and where it is reached."""

    process: asyncio.subprocess.Process
    endpoint: str

    async def ask(self, command: str) -> Any:
        """What a `nixl_decode` answers to a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n".encode())
        said = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        return json.loads(said)


@contextlib.asynccontextmanager
async def server_process(module: str, **settings: object) -> AsyncIterator[ServerProcess]:
    """One that is ready."""
    settings = {**{name: SMALL[name] for name in _SHARED}, **settings}
    flags = ["--engine", "sim", "--transports", "nixl,inline"]
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield ServerProcess(process, ready.decode().split()[3])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def prefill_process() -> contextlib.AbstractAsyncContextManager[ServerProcess]:
    """A P that computes slowly."""
    return server_process(
        "pd_grpc.servers.prefill",
        name="p",
        num_blocks=SMALL["num_blocks"],
        sim_time_scale=50,
        connect_s=20,
    )
