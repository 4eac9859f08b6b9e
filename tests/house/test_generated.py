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


@pytest.fixture(scope="module")
def generator() -> None:
    """Skips where the generator is not to be had."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    installed = make("protoc")
    if installed.returncode != 0:
        pytest.skip(f"the generator cannot be installed: {installed.stderr.strip()[-300:]}")


@pytest.mark.timeout(300)  # the first run installs the generator
@pytest.mark.usefixtures("generator")
def test_the_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    made = make("protos", f"GENERATED={tmp_path}")

    assert made.returncode == 0, made.stderr
    fresh, committed = generated(tmp_path), generated(ROOT)
    assert fresh, "the protos generate nothing"
    stale = {name for name in fresh | committed if fresh.get(name) != committed.get(name)}
    assert not stale, f"run `make protos` and commit: {', '.join(sorted(stale))}"


@pytest.fixture
def old_code(tmp_path: Path) -> Path:
    """A folder with generated code of before, of which one proto is gone."""
    code = tmp_path / "pd_grpc" / "v1"
    code.mkdir(parents=True)
    for name in ("types_pb2.py", "gone_pb2.py", "gone_pb2.pyi", "gone_pb2_grpc.py"):
        (code / name).write_text("before", encoding="utf-8")
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("generator")
def test_the_code_of_a_proto_that_is_gone_goes_too(old_code: Path) -> None:
    made = make("protos", f"GENERATED={old_code}")

    assert made.returncode == 0, made.stderr
    fresh = generated(old_code)
    assert not [name for name in fresh if name.startswith("gone")]
    assert fresh["types_pb2.py"] != b"before"
    assert [path.name for path in old_code.iterdir()] == ["pd_grpc"], "nothing is left lying"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("generator")
def test_a_proto_that_does_not_compile_leaves_the_code_as_it_was(old_code: Path) -> None:
    before = generated(old_code)

    made = make("protos", f"GENERATED={old_code}", "PROTOS=protos/pd_grpc/v1/no_such.proto")

    assert made.returncode != 0
    assert generated(old_code) == before
    assert [path.name for path in old_code.iterdir()] == ["pd_grpc"], "nothing is left lying"
