"""The cache of converted weights: no crash, damage or other process has it give wrong ones."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from pd_grpc.engine.weight_cache import NotCached, WeightCache, cache_key, file_digest, weight_cache

KEY = cache_key("a file", "bfloat16")
TENSORS = {
    "first": torch.arange(3000, dtype=torch.float32).reshape(30, 100),
    "second": torch.arange(7, dtype=torch.bfloat16),
    "third": torch.full((2, 2, 2), 0.5, dtype=torch.float16),
}
MIB = 1 << 20


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()


def store(folder: Path, key: str = KEY, most_bytes: int = MIB) -> Path:
    return WeightCache(folder, most_bytes).store(key, 500, tensors())


def find(folder: Path, key: str = KEY) -> Path | None:
    return WeightCache(folder, MIB).find(key)


def test_what_was_stored_is_found_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert find(folder) is None

    path = store(folder)

    assert find(folder) == path
    assert find(folder, cache_key("a file", "float32")) is None
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == [path]


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert file_digest(one) == file_digest(other)

    times = one.stat()
    one.write_bytes(b"Weights")
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(one) != file_digest(other)


def test_a_bit_that_flipped_anywhere_is_noticed(tmp_path: Path) -> None:
    whole = store(tmp_path).read_bytes()
    for at in (0, 9, 300, len(whole) // 2, len(whole) - 1):
        path = store(tmp_path)
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)

        assert find(tmp_path) is None
        assert not path.exists()


@pytest.mark.parametrize("left", [0, 8, 1000])
def test_an_entry_that_is_cut_off_is_thrown_away(tmp_path: Path, left: int) -> None:
    path = store(tmp_path)
    os.truncate(path, left)

    assert find(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_others_may_write_is_thrown_away(tmp_path: Path) -> None:
    path = store(tmp_path)
    path.chmod(0o622)

    assert find(tmp_path) is None
    assert not path.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    path = store(folder)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)

    with pytest.raises(NotCached):
        find(folder)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    store(tmp_path)
    tmp_path.chmod(0o777)

    with pytest.raises(NotCached, match="others may write to"):
        find(tmp_path)
    with pytest.raises(NotCached, match="others may write to"):
        store(tmp_path)


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)

    with pytest.raises(NotCached, match="others may write to"):
        find(tmp_path)


def test_a_folder_that_cannot_be_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(NotCached, match=r"Not a directory|File exists"):
        find(tmp_path / "file" / "cache")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # The size a process may give a file is the disk that is full here.
    code = f"""
import resource, signal
from tests.engine import test_weight_cache as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    t.store(t.Path({str(tmp_path)!r}))
except t.NotCached as why:
    print(why)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)

    assert "File too large" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "number", "when"),
    [
        ("open", 1, "after"),
        ("pwrite", 2, "in"),
        ("pwrite", 4, "in"),  # the header, which is written last
        ("fsync", 1, "before"),
        ("rename", 1, "before"),
        ("rename", 1, "after"),
    ],
)
def test_a_writer_that_is_killed_leaves_no_entry_or_a_whole_one(
    tmp_path: Path, call: str, number: int, when: str
) -> None:
    code = f"""
import os, signal
from tests.engine import test_weight_cache as t
calls, real = [0], os.{call}
def dying(*args, **options):
    calls[0] += 1
    last = calls[0] == {number}
    if last and {when == "before"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if last and {when == "in"}:
        real(args[0], args[1][:len(args[1]) // 2], args[2])
        os.kill(os.getpid(), signal.SIGKILL)
    done = real(*args, **options)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
os.{call} = dying
t.store(t.Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50)
    assert done.returncode == -signal.SIGKILL, done.stderr

    found = find(tmp_path)
    assert (found is not None) == ((call, when) == ("rename", "after"))
    if found is not None:
        assert torch.equal(load_file(found)["first"], TENSORS["first"])
    path = store(tmp_path)
    assert list(tmp_path.iterdir()) == [path], "what the dead one left is gone"


def test_what_a_living_writer_has_under_way_is_left_alone(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", TENSORS["first"]
        # Another process, which cleans up, in the midst of it. Locks are per open file.
        assert find(tmp_path) is None
        store(tmp_path, cache_key("another"))
        yield "second", TENSORS["second"]

    path = WeightCache(tmp_path, MIB).store(KEY, 500, interrupted())

    assert find(tmp_path) == path
    assert torch.equal(load_file(path)["second"], TENSORS["second"])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_writer_that_loses_its_file_says_so(tmp_path: Path) -> None:
    def robbed() -> Iterator[tuple[str, torch.Tensor]]:
        for path in tmp_path.iterdir():
            path.unlink()
        yield "first", TENSORS["first"]

    with pytest.raises(NotCached, match="No such file"):
        WeightCache(tmp_path, MIB).store(KEY, 500, robbed())
    assert find(tmp_path) is None


def test_what_fails_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", TENSORS["first"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WeightCache(tmp_path, MIB).store(KEY, 500, failing())
    assert list(tmp_path.iterdir()) == []


def test_two_that_make_the_same_entry_at_once_both_have_it(tmp_path: Path) -> None:
    code = f"""
import time
from tests.engine import test_weight_cache as t
folder = t.Path({str(tmp_path)!r})
print("ready", flush=True)
input()
until = time.monotonic() + 20
for _ in range(50):
    t.store(folder)
    assert t.find(folder) is not None
    if time.monotonic() > until:
        break
"""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=120)

    assert [process.returncode for process in both] == [0, 0]
    assert [find(tmp_path)] == list(tmp_path.iterdir())


def test_a_file_that_is_removed_before_it_has_its_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[Path] = []

    def locked_after_a_remover(fd: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".writing-*"))
            removed[0].unlink()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", locked_after_a_remover)
    store(tmp_path)

    assert len(removed) == 1
    assert [find(tmp_path)] == list(tmp_path.iterdir())


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    keys = [cache_key(name) for name in "abc"]
    paths = [store(tmp_path, key) for key in keys[:2]]
    for age, path in zip((20, 10), paths, strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    size = paths[0].stat().st_size
    assert find(tmp_path, keys[0]) is not None

    store(tmp_path, keys[2], most_bytes=2 * size)

    assert [find(tmp_path, key) is not None for key in keys] == [True, False, True]


def test_what_is_larger_than_the_cache_is_not_written(tmp_path: Path) -> None:
    kept = store(tmp_path)

    with pytest.raises(NotCached, match="more than the 0 MiB"):
        store(tmp_path, cache_key("b"), most_bytes=kept.stat().st_size - 1)
    assert list(tmp_path.iterdir()) == [kept]


def test_the_settings_say_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weight_cache("off", 1.0) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = weight_cache("auto", 1.0)
    assert cache is not None
    cache.store(KEY, 500, tensors())
    assert find(tmp_path / "pd-grpc" / "weights") is not None
    named = weight_cache(str(tmp_path / "here"), 1.0)
    assert named is not None and named.find(KEY) is None


@pytest.mark.parametrize("where", ["auto", "~there-is-no-such-user/cache"])
def test_where_there_is_no_home_directory_nothing_is_cached(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "~there-is-no-such-user")
    cache = weight_cache(where, 1.0)
    assert cache is not None

    with pytest.raises(NotCached, match="no such home directory"):
        cache.find(KEY)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_is_found_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store(tmp_path)

    def on_such_a_disk(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", on_such_a_disk)
    assert find(tmp_path) == kept


def test_a_lock_is_what_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    left = tmp_path / ".writing-1-x"
    left.write_bytes(b"half")
    with left.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store(tmp_path)
        assert left.exists()
    store(tmp_path)
    assert not left.exists()
