"""A run of the conformance kit against one subject, which may be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from pd_grpc.conformance.case import Case, Cases
from pd_grpc.conformance.run import Result, run_cases


@dataclass(frozen=True)
class Places:
    """Where a subject finds the kit: the host at which a P finds its Ds, and the endpoints of the
    instances behind a router. An empty `alternate` is none."""

    host: str = "127.0.0.1"
    prefill: str = "127.0.0.1:50071"
    decode: str = "127.0.0.1:50072"
    alternate: str = "127.0.0.1:50073"


@dataclass(frozen=True)
class Role:
    """What can be judged: its cases, and how to meet a subject at an endpoint."""

    cases: Cases[Any]
    meet: Callable[[str, Places], AbstractAsyncContextManager[Any]]


def role_of(name: str) -> Role:
    """The role `decode`, `prefill` or `router`. ModuleNotFoundError where what its cases need is
    not installed; it is imported here, for other commands do without."""
    if name == "decode":
        from pd_grpc.conformance.decode import DECODE_CASES, open_decode

        return Role(DECODE_CASES, lambda endpoint, places: open_decode(endpoint))
    if name == "prefill":
        from pd_grpc.conformance.prefill import PREFILL_CASES, open_prefill

        return Role(PREFILL_CASES, lambda endpoint, places: open_prefill(endpoint, places.host))
    from pd_grpc.conformance.router import ROUTER_CASES

    return Role(ROUTER_CASES, _meet_router)


@contextlib.asynccontextmanager
async def _meet_router(endpoint: str, places: Places) -> AsyncIterator[Any]:
    from pd_grpc.conformance.router import open_instances, open_router

    behind = (places.prefill, places.decode, places.alternate)
    async with open_instances(*behind) as instances, open_router(endpoint, instances) as subject:
        yield subject


@dataclass
class Run:
    """What is judged, and what has come of it so far. Each of `heard` is called with a result as it
    comes; `stopped_by` is the signal that ended the run early."""

    role: str
    endpoint: str
    cases: Sequence[Case[Any]]
    tries: int = 1
    heard: list[Callable[[Result], None]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    stopped_by: signal.Signals | None = None

    def __post_init__(self) -> None:
        self.about = {"role": self.role, "endpoint": self.endpoint}

    async def judge(self, places: Places) -> None:
        """Meet the subject and run the cases, until the first SIGINT or SIGTERM; a second one ends
        the process. Broken when there is nothing that can be judged, PortInUse where the kit
        cannot listen, grpc.RpcError where nobody answers."""
        self._listen_for_signals()
        try:
            async with role_of(self.role).meet(self.endpoint, places) as subject:
                self.about |= {"name": subject.instance.name, "model": subject.info.model}
                await run_cases(subject, self.cases, self._hear, self.tries)
        except asyncio.CancelledError:
            if self.stopped_by is None:
                raise

    def _hear(self, result: Result) -> None:
        self.results.append(result)
        for hear in self.heard:
            hear(result)
        if self.stopped_by is not None:
            # The case ended in the moment in which it was cancelled.
            raise asyncio.CancelledError

    def _listen_for_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop(signum: signal.Signals) -> None:
            self.stopped_by = signum
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            if task is not None:
                task.cancel()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop, each)
