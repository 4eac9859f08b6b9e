"""The programs of examples/node as processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.subjects import SHORT

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "node"
INSTALL_S = 300.0
START_S = 20.0
END_S = 10.0

KIT: dict[str, int] = {
    "num_blocks": 64,
    "window_bytes": 4096,
    "allocate_queue": 128,
    **{name.removesuffix("_s") + "_ms": round(1500 * value) for name, value in SHORT.items()},
}
"""Options of a decode.js that the kit judges: few blocks, a short queue, and short times. They are
half as long again as those of our own D, for the kit runs in another process and may be late."""


def install_packages() -> None:
    """See that node_modules is what package-lock.json says. Skips where node or npm is missing."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    lock = FOLDER / "package-lock.json"
    installed = FOLDER / "node_modules" / ".package-lock.json"
    with lock.open() as held:
        # Two runs of the tests must not install at once.
        fcntl.flock(held, fcntl.LOCK_EX)
        if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
            return
        npm = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        assert npm.returncode == 0, npm.stderr


@dataclass
class NodeDecode:
    """A running decode.js."""

    process: asyncio.subprocess.Process
    name: str
    endpoint: str

    async def ends(self) -> int:
        """Wait for its end; the exit status."""
        return await asyncio.wait_for(self.process.wait(), END_S)


@contextlib.asynccontextmanager
async def node_decode(**options: int | str) -> AsyncIterator[NodeDecode]:
    """decode.js, ready, with options such as `num_blocks=64`; killed at the end. What it wrote to
    stderr fails the test, for it writes there only when it crashes."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        "node",
        "decode.js",
        *arguments,
        cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert line, (await errors).decode()
        ready = json.loads(line)
        yield NodeDecode(process, ready["name"], ready["endpoint"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        written = (await errors).decode()
    assert not written, written


async def node_client(endpoint: str, text: str, seconds: float = 20.0) -> tuple[int, str, str]:
    """Run client.js to its end: exit status, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        "node",
        "client.js",
        endpoint,
        text,
        str(seconds),
        cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), seconds + END_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()
