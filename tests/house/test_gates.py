"""The suite's own settings really fail a test that leaks or hangs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_pytest(folder: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one test module under the project's configuration and conftest."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "test_it.py").write_text(test, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_clean_test_passes(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "async def test_it():\n    assert True\n")
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout.splitlines()[-1]


def test_a_coroutine_never_awaited_fails(tmp_path: Path) -> None:
    result = run_pytest(
        tmp_path,
        "async def work(): pass\ndef test_it():\n    coroutine = work()\n    del coroutine\n",
    )
    assert result.returncode == 1, result.stdout
    assert "was never awaited" in result.stdout


def test_an_exception_in_a_thread_nobody_joins_fails(tmp_path: Path) -> None:
    result = run_pytest(
        tmp_path,
        "import threading\n"
        "def test_it():\n"
        "    thread = threading.Thread(target=lambda: 1 / 0)\n"
        "    thread.start()\n"
        "    thread.join()\n",
    )
    assert result.returncode == 1, result.stdout
    assert "ZeroDivisionError" in result.stdout


def test_a_process_left_behind_fails(tmp_path: Path) -> None:
    conftest_waits_less = "import psutil\n_wait = psutil.wait_procs\n"
    result = run_pytest(
        tmp_path,
        conftest_waits_less
        + "psutil.wait_procs = lambda procs, timeout: _wait(procs, timeout=0.2)\n"
        + "import subprocess, sys\n"
        + "left = []\n"
        + "def test_it():\n"
        + "    left.append(subprocess.Popen(['sleep', '30']))\n",
    )
    assert result.returncode == 1, result.stdout
    assert "left behind by the tests: process" in result.stdout
    assert "sleep 30" in result.stdout


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
def test_shared_memory_left_behind_fails(tmp_path: Path) -> None:
    segment = Path(f"/dev/shm/pd-grpc-gate-{tmp_path.name}")
    try:
        result = run_pytest(
            tmp_path,
            f"def test_it():\n    open({str(segment)!r}, 'w').close()\n",
        )
    finally:
        segment.unlink(missing_ok=True)
    assert result.returncode == 1, result.stdout
    assert f"shared memory {segment}" in result.stdout


def test_a_test_that_hangs_is_stopped_by_the_timeout(tmp_path: Path) -> None:
    result = run_pytest(
        tmp_path,
        "import threading\ndef test_it():\n    threading.Event().wait()\n",
        "--timeout=1",
    )
    assert result.returncode == 1, result.stdout
    assert "Timeout (>1.0s)" in result.stdout


def test_a_skipped_test_prints_why(tmp_path: Path) -> None:
    result = run_pytest(
        tmp_path, "import pytest\ndef test_it():\n    pytest.skip('the model is not here')\n"
    )
    assert "the model is not here" in result.stdout
