"""The pd-grpc command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMAND = [sys.executable, "-m", "pd_grpc.cli.main"]


def pd_grpc(
    *arguments: str,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 150,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with these variables beside the test's own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(environ or {})},
    )
