"""The demonstration as a process, with the packaged model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.longest
@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("packaged_model")
def test_the_demonstration_answers_and_shows_where_the_time_went(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pd_grpc.cli.demo"],
        timeout=230,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    for name in ("router", "prefill-0", "decode-0"):
        assert re.search(rf"^{name}: process \d+$", done.stdout, re.MULTILINE)
    answers = done.stdout.split("Where the time")[0]
    assert "Paris" in answers and "4" in answers.split("What is 2 + 2?")[1]
    waited_for = ("route", "queue", "prepare", "compute", "first_token", "decode", "step_wait")
    for stage in waited_for:
        bar = rf"^\* +pd\.{stage} +(router|prefill-0|decode-0) +\d+\.\d +█+$"
        assert re.search(bar, done.stdout, re.MULTILINE), done.stdout
    for token in ("first token after", "second token behind it by"):
        assert re.search(rf"^{token} \d+\.\d ms: ", done.stdout, re.MULTILINE), done.stdout
    assert "prefilled by prefill-0" in done.stdout and "decoded by decode-0" in done.stdout
    assert list(tmp_path.glob("pd-grpc-*")) == [], "logs are left"
