"""The committed code under pd_grpc/v1 is what the protos generate."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The flags of a make that runs this suite are not meant for the one started here.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def generated(folder: Path) -> dict[str, bytes]:
    files = sorted((folder / "pd_grpc" / "v1").glob("*_pb2*.py*"))
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.timeout(300)  # the first run installs the generator
def test_the_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    installed = make("protoc")
    if installed.returncode != 0:
        pytest.skip(f"the generator cannot be installed: {installed.stderr.strip()[-300:]}")

    made = make("protos", f"GENERATED={tmp_path}")

    assert made.returncode == 0, made.stderr
    fresh, committed = generated(tmp_path), generated(ROOT)
    assert fresh, "the protos generate nothing"
    stale = {name for name in fresh | committed if fresh.get(name) != committed.get(name)}
    assert not stale, f"run `make protos` and commit: {', '.join(sorted(stale))}"
