"""One NIXL agent over UCX, and all that is known here of the library.

Its C++ interface is used as it is, for the Python class around it makes an agent whose progress
thread polls without pause: a core for each, idle or not.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from pd_grpc.transport.base import NotUsable

VERSION = "1.5.1"
HOW_TO_INSTALL = f"pip install --no-deps nixl=={VERSION} nixl-cu12=={VERSION}"
_BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""One for each kind of GPU; any of them does where there is none."""
_BACKEND = "UCX"
_PROGRESS_US = 100_000
"""How long the progress thread sleeps unless something comes; with 0 it would not sleep."""
_SHARED = frozenset(
    ("all", "*", "shm", "sm", "mm", "cma", "knem", "xpmem", "posix", "sysv", "cuda_ipc", "rocm_ipc")
)
"""What UCX calls the ways of one host by which P can write when D's agent is no more."""


class AgentError(Exception):
    """NIXL could not do it; the message says what."""


class Region(NamedTuple):
    """Host memory, by the address of its first byte and its size in bytes."""

    address: int
    size: int


class Piece(NamedTuple):
    """Bytes to write: where they lie here, where they go there, and how many."""

    source: int
    target: int
    size: int


def require() -> None:
    """NotUsable unless agents can be made here, which is tried."""
    tls = os.environ.get("UCX_TLS")
    if tls is not None and _allows_shared_memory(tls):
        raise NotUsable(
            f"UCX_TLS is {tls}, with which P may write into D's memory when D has ended that; unset"
            " it, or have it leave out what works on one host alone, as ^shm does"
        )
    try:
        Agent(None, loopback=True).destroy()
    except AgentError as error:
        raise NotUsable(f"NIXL has no UCX here: {error}") from error


def _allows_shared_memory(tls: str) -> bool:
    named = {name.strip() for name in tls.lstrip("^").split(",")}
    if tls.startswith("^"):
        return not named & {"shm", "sm"}
    return bool(named & _SHARED)


def _library() -> Any:
    """The bindings. NotUsable where there are none."""
    # `nixl` itself would choose, and import torch for it.
    name = next((name for name in _BUILDS if find_spec(name) is not None), None)
    if name is None:
        raise NotUsable(f"NIXL, the extra pd-grpc[nixl], is not installed: {HOW_TO_INSTALL}")
    # UCX would complain in the midst of what a server says on its standard output.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    try:
        return importlib.import_module(f"{name}._bindings")
    except (ImportError, OSError) as error:
        raise NotUsable(f"NIXL cannot be loaded: {error}") from error


class Agent:
    """An agent with one region of memory registered, or none. From any thread."""

    def __init__(self, region: Region | None, loopback: bool) -> None:
        """`loopback` keeps it to this machine's own network. AgentError when there is none to be
        had, NotUsable when there is no library."""
        self._nixl = library = _library()
        self._errors = tuple(
            found
            for name in dir(library)
            if isinstance(found := getattr(library, name), type) and issubclass(found, Exception)
        )
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_US
        config.syncMode = library.NIXL_THREAD_SYNC_STRICT
        ucx = ["TLS=^shm", *(["NET_DEVICES=lo"] if loopback else [])]
        self._agent: Any = None
        self._peer = ""
        self._unreleased: set[int] = set()
        try:
            self._agent = library.nixlAgent(f"pd-grpc-{secrets.token_hex(8)}", config)
            self._agent.createBackend(_BACKEND, {"engine_config": ",".join(ucx)})
            if region is not None:
                memory = [(region.address, region.size, 0, "")]
                self._agent.registerMem(library.nixlRegDList(library.DRAM_SEG, memory), [])
        except self._errors as error:
            self._agent = None
            raise AgentError(f"no agent can be made: {error}") from error

    def metadata(self) -> bytes:
        """What another agent needs to write into this one's memory."""
        found: bytes = self._agent.getLocalMD()
        return found

    def meet(self, metadata: bytes) -> None:
        """Get ready to write into the memory of another. AgentError when that cannot be."""
        try:
            self._peer = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(self._peer, [])
        except self._errors as error:
            raise AgentError(f"D's agent cannot be reached: {error}") from error

    def write(self, pieces: Sequence[Piece]) -> int:
        """Begin to write; what `landed` knows it by. AgentError when that cannot be."""
        nixl = self._nixl
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(p.source, p.size, 0) for p in pieces])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(p.target, p.size, 0) for p in pieces])
        try:
            write: int = self._agent.createXferReq(nixl.NIXL_WRITE, here, there, self._peer)
            self._unreleased.add(write)
            self._agent.postXferReq(write)
        except self._errors as error:
            raise AgentError(f"a write could not be begun: {error}") from error
        return write

    def landed(self, write: int) -> bool:
        """Whether all of it is in the other's memory; then it is forgotten. AgentError when it has
        failed, and some of it may land yet."""
        try:
            status = self._agent.getXferStatus(write)
            if status == self._nixl.NIXL_IN_PROG:
                return False
            if status != self._nixl.NIXL_SUCCESS:
                raise AgentError(f"a write has failed: {status}")
            self._unreleased.discard(write)
            self._agent.releaseXferReq(write)
        except self._errors as error:
            raise AgentError(f"a write has failed: {error}") from error
        return True

    def destroy(self) -> None:
        """Reads no memory of here after that, and writes to none. What it has sent and the other
        has not taken in may land there."""
        agent, self._agent = self._agent, None
        for write in self._unreleased:
            try:
                agent.releaseXferReq(write)
            except self._errors:
                # It cannot be cancelled; it ends with the agent.
                continue
        self._unreleased.clear()
        del agent
