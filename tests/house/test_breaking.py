"""A change of the protocol may add to it; it may not take away, renumber or retype."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = Path("protos/pd_grpc/v1")
BASELINE = Path("tests/compat/baseline/pd_grpc/v1")

TAKEN_AWAY = [
    ("transfer.proto", "uint32 shard_index = 6;", "", 'field "6" with name "shard_index"'),
    ("transfer.proto", "uint32 shard_index = 6;", "uint32 shard_index = 70;", 'field "6"'),
    (
        "transfer.proto",
        "uint32 shard_index = 6;",
        "uint64 shard_index = 6;",
        "changed type",
    ),
    ("transfer.proto", "uint32 shard_index = 6;", "uint32 shard = 6;", '"shard_index" to "shard"'),
    ("types.proto", "FINISH_REASON_LENGTH = 2;", "", 'enum value "2"'),
    (
        "decode.proto",
        "rpc Release(ReleaseRequest) returns (ReleaseResponse);",
        "",
        'RPC "Release" on service "DecodeService"',
    ),
]
ADDED = [
    ("transfer.proto", "uint32 shard_index = 6;", "uint32 shard_index = 6; uint32 more = 90;"),
    ("types.proto", "FINISH_REASON_LENGTH = 2;", "FINISH_REASON_LENGTH = 2; FINISH_REASON_X = 9;"),
]

Gate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """`make protos-breaking`, or another target, over a copy of the protocol and of its baseline in
    `tmp_path`."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    for folder in (PROTOS, BASELINE):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")

    def run(target: str = "protos-breaking") -> subprocess.CompletedProcess[str]:
        # The environment is there: it is not to be made anew for a copy of the Makefile.
        return _run(tmp_path, "make", "--old-file=.venv/.installed", target)

    return run


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # Neither the flags of a make that runs this suite nor a repository around it are meant.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "GIT"))}
    environ |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=50, check=False
    )


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {old!r} no longer: choose another example"
    path.write_text(text.replace(old, new))


def test_the_protocol_breaks_nothing_that_was_landed(gate: Gate) -> None:
    passed = gate()
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert f'"path": "{BASELINE.parents[1]}"' in passed.stdout, "no tag: it is the baseline"


@pytest.mark.parametrize(("proto", "old", "new", "named"), TAKEN_AWAY)
def test_what_was_landed_cannot_be_taken_away(
    gate: Gate, tmp_path: Path, proto: str, old: str, new: str, named: str
) -> None:
    _change(tmp_path / PROTOS / proto, old, new)
    refused = gate()
    assert refused.returncode != 0
    assert f"pd_grpc/v1/{proto}:" in refused.stdout and named in refused.stdout, refused.stdout


@pytest.mark.parametrize(("proto", "old", "new"), ADDED)
def test_what_is_added_breaks_nothing(
    gate: Gate, tmp_path: Path, proto: str, old: str, new: str
) -> None:
    _change(tmp_path / PROTOS / proto, old, new)
    passed = gate()
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_what_has_become_the_baseline_cannot_be_taken_away_either(
    gate: Gate, tmp_path: Path
) -> None:
    transfer = tmp_path / PROTOS / "transfer.proto"
    _change(transfer, "uint32 shard_index = 6;", "uint32 shard_index = 6; uint32 more = 90;")
    made = gate("protos-baseline")
    assert made.returncode == 0, made.stderr
    baseline = (tmp_path / BASELINE / "transfer.proto").read_text()
    assert "uint32 more = 90;" in baseline and "//" not in baseline
    _change(transfer, "uint32 more = 90;", "")
    assert 'field "90" with name "more"' in gate().stdout


def test_a_break_cannot_become_the_baseline(gate: Gate, tmp_path: Path) -> None:
    _change(tmp_path / PROTOS / "transfer.proto", "uint32 shard_index = 6;", "")
    assert gate("protos-baseline").returncode != 0
    assert "shard_index" in (tmp_path / BASELINE / "transfer.proto").read_text()


def test_once_there_is_a_tag_it_is_what_a_change_must_not_break(gate: Gate, tmp_path: Path) -> None:
    transfer = tmp_path / PROTOS / "transfer.proto"
    _change(transfer, "uint32 shard_index = 6;", "uint32 shard_index = 6; uint32 more = 90;")
    me = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "tag.gpgSign=false")
    for git in (["init", "-q"], ["add", "protos"], ["commit", "-qm", "more"], ["tag", "v9"]):
        done = _run(tmp_path, "git", *me, "-c", "commit.gpgSign=false", *git)
        assert done.returncode == 0, done.stderr
    _change(transfer, "uint32 more = 90;", "")
    refused = gate()
    assert refused.returncode != 0
    assert 'field "90" with name "more"' in refused.stdout, refused.stdout
