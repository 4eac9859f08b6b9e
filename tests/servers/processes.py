"""The servers as processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 40.0
END_S = 20.0
SIM = ("--engine", "sim", "--num-blocks", "64", "--block-size", "4", "--chunk-tokens", "16")


@contextmanager
def server(role: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A file of `servers/`, killed if the test forgets it."""
    running = subprocess.Popen(
        [sys.executable, "-m", f"pd_grpc.servers.{role}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate(timeout=END_S)


def ready(running: subprocess.Popen[str]) -> list[str]:
    """The words of the ready line."""
    assert running.stdout is not None
    return running.stdout.readline().split()
