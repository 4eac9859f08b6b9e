"""Weights kept converted on disk; no crash, full disk or flipped bit there makes them wrong.

An entry is one safetensors file, `<key>-<crc32c of all its bytes>.safetensors`. It gets that name
when all of it is on the disk, and its checksum is looked at whenever it is opened; whatever else is
found under the name of an entry is thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c
import torch

_FORMAT = 1
"""In every key; another layout of the file, or other care in its making, gets another."""
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PIECE = 8 << 20
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_TEMPORARY = ".writing-"
_ENDING = ".safetensors"
_ATTEMPTS = 100


class NotCached(Exception):
    """The cache cannot be used; the message says why. Loading goes on without it."""


class WeightCache:
    """A folder of entries, the least recently used of which make room for new ones.

    Several processes may use it at once. Two that lack the same entry both make it.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def find(self, key: str) -> Path | None:
        """The file of an entry, verified; None when there is none. NotCached when the folder is not
        ours alone, or cannot be read. It need not be writable for an entry to be found."""
        with self._usable():
            for path in sorted(self._folder.glob(f"{key}-*{_ENDING}")):
                if self._sound(path):
                    # On a disk that cannot be written to nothing is removed for its age either.
                    with contextlib.suppress(OSError):
                        os.utime(path)
                    return path
                path.unlink(missing_ok=True)
        return None

    def store(
        self, key: str, header_bytes: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Path:
        """Write an entry, one tensor after another, and return its file.

        `header_bytes` is room for the names and shapes. NotCached when it cannot be written, or is
        larger than the cache may be; nothing of it is left then."""
        with self._usable():
            self._remove_abandoned()
            path, fd = self._begin()
            try:
                size = _write(fd, header_bytes, tensors, self._most_bytes)
                final = self._folder / f"{key}-{_checksum(fd):08x}{_ENDING}"
                self._make_room(size)
                os.fsync(fd)
                os.rename(path, final)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            self._sync_folder()
        return final

    def _begin(self) -> tuple[Path, int]:
        """A new file to write to, and its descriptor, which has its lock: held for as long as it is
        written, so that nobody takes it for abandoned."""
        for _ in range(_ATTEMPTS):
            path = self._folder / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return path, fd
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
            # Somebody has looked for abandoned ones before it had its lock.
            os.close(fd)
        raise NotCached(f"others remove what is written to {self._folder}")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            if str(self._folder).startswith("~"):
                raise NotCached(f"{self._folder}: there is no such home directory")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
                raise NotCached(f"others may write to {self._folder}")
            yield
        except OSError as error:
            raise NotCached(f"{self._folder}: {error.strerror or error}") from error

    def _sound(self, path: Path) -> bool:
        """Whether the file is ours alone and has the bytes that its name tells of."""
        told = path.name.removesuffix(_ENDING).rpartition("-")[2]
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not ours or found.st_mode & _OTHERS:
                return False
            return f"{_checksum(fd):08x}" == told
        finally:
            os.close(fd)

    def _remove_abandoned(self) -> None:
        """Remove what writers left that died: nobody holds the lock of it any more."""
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                pass
            finally:
                os.close(fd)

    def _make_room(self, size: int) -> None:
        entries = []
        for path in self._folder.glob(f"*{_ENDING}"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                entries.append((found.st_mtime_ns, found.st_size, path))
        total = size + sum(entry[1] for entry in entries)
        for _, bytes_there, path in sorted(entries):
            if total <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= bytes_there

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def weight_cache(where: str, most_gib: float) -> WeightCache | None:
    """The cache that the settings `weight_cache` and `weight_cache_gib` mean; None for `off`."""
    if where == "off":
        return None
    folder = Path(where)
    if where == "auto":
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(base) / "pd-grpc" / "weights"
    # A user whom the system does not know has no home, as in many a container.
    with contextlib.suppress(RuntimeError):
        folder = folder.expanduser()
    return WeightCache(folder, int(most_gib * (1 << 30)))


def cache_key(*parts: str) -> str:
    """A name for what was made from `parts`."""
    text = json.dumps([_FORMAT, *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes: what it holds, whatever its name, age or place."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _write(
    fd: int, header_bytes: int, tensors: Iterable[tuple[str, torch.Tensor]], most_bytes: int
) -> int:
    """Write a safetensors file whose header has `header_bytes`, filled up with spaces."""
    header_bytes += -header_bytes % 8
    entries: dict[str, dict[str, object]] = {}
    begin = 8 + header_bytes
    at = 0
    for name, tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        if begin + at + len(data) > most_bytes:
            raise NotCached(f"the weights take more than the {most_bytes >> 20} MiB it may have")
        for start in range(0, len(data), _PIECE):
            _write_all(fd, data[start : start + _PIECE], begin + at + start)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    header = json.dumps(entries, separators=(",", ":")).encode()
    if len(header) > header_bytes:
        raise NotCached(f"a header of {len(header)} bytes does not fit into {header_bytes}")
    _write_all(fd, memoryview(header_bytes.to_bytes(8, "little") + header.ljust(header_bytes)), 0)
    return begin + at


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _checksum(fd: int) -> int:
    crc, at = 0, 0
    while piece := os.pread(fd, _PIECE, at):
        crc = google_crc32c.extend(crc, piece)
        at += len(piece)
    return int(crc)
