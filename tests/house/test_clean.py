"""`make clean` leaves nothing that the build, the tests or the examples have made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_clean_removes_whatever_git_ignores() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()

    # What it would do, for it would remove the environment that this test runs in.
    said = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "clean"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    removed = {Path(word).name for word in said.stdout.split()}
    assert ignored
    assert not [name for name in ignored if name.rstrip("/") not in removed]
