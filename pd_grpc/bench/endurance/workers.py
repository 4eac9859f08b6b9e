"""P, D and the router as they are, as processes that can be killed and brought back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.engine.load import load_engine, load_tokenizer
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_grpc.router.discovery import InstanceView
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.servers import process

_LAST_BLOCKS_S = 2.0
"""How long after a drain the blocks of the last transfer may still be on their way back."""
_LOOK_S = 0.01


class _PlainEngine:
    """A P or a D. It can be drained."""

    _server: PrefillServer | DecodeServer | None = None

    async def do(self, command: Mapping[str, Any]) -> Any:
        assert self._server is not None
        return await _drained(self._server, command)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


class PlainPrefill(_PlainEngine):
    """`settings` are those of PrefillConfig, by name."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = PrefillConfig(**spec["settings"])

    async def start(self) -> Mapping[str, Any]:
        engine = await process.load(lambda: load_engine(self._config))
        self._server = server = await start_prefill(self._config, engine)
        return {
            "pid": os.getpid(),
            "endpoint": f"127.0.0.1:{server.control.port}",
            "epoch": server.instance.epoch,
        }


class PlainDecode(_PlainEngine):
    """`settings` are those of DecodeConfig, by name."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = DecodeConfig(**spec["settings"])

    async def start(self) -> Mapping[str, Any]:
        engine = await process.load(lambda: load_engine(self._config))
        self._server = server = await start_decode(self._config, engine)
        return {
            "pid": os.getpid(),
            "endpoint": f"127.0.0.1:{server.control.port}",
            "bulk": f"127.0.0.1:{server.bulk.port}",
            "epoch": server.instance.epoch,
        }


async def _drained(server: PrefillServer | DecodeServer, command: Mapping[str, Any]) -> int:
    """Drain for `deadline_s`; blocks that have not come back by then."""
    if command["do"] != "drain":
        raise ValueError(f"do: {command['do']!r} is nothing that an instance does")
    server.drain(command["deadline_s"])
    await server.drained()
    until = time.monotonic() + _LAST_BLOCKS_S
    while (held := _held(server.pool)) and time.monotonic() < until:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(_LOOK_S)
    return held


def _held(pool: BlockPool) -> int:
    counts = pool.counts()
    return pool.total - counts[BlockState.FREE] - counts[BlockState.CACHED]


class PlainRouter:
    """`settings` are those of RouterConfig. It notes when each instance turns ready or not."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = RouterConfig(**spec["settings"])
        self._server: RouterServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._changes: list[tuple[float, str, bool]] = []

    async def start(self) -> Mapping[str, Any]:
        config = self._config
        tokenizer = await asyncio.to_thread(
            load_tokenizer, config.engine, config.model, config.sim_vocab
        )
        self._server = server = await start_router(config, tokenizer)
        self._watching = asyncio.create_task(self._watch(server))
        return {"pid": os.getpid(), "endpoint": server.endpoint}

    async def do(self, command: Mapping[str, Any]) -> Any:
        assert self._server is not None
        if command["do"] == "instances":
            views = self._server.discovery.instances
            return [{"name": v.name, "epoch": v.epoch, "ready": v.ready} for v in views]
        if command["do"] == "changes":
            changes, self._changes = self._changes, []
            return changes
        raise ValueError(f"do: {command['do']!r} is nothing that the router does")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._server is not None:
            await self._server.stop(0.0)

    async def _watch(self, server: RouterServer) -> None:
        discovery = server.discovery
        known = [view.ready for view in discovery.instances]
        while True:
            await discovery.changed()
            for i, view in enumerate(discovery.instances):
                if view.ready != known[i]:
                    known[i] = view.ready
                    self._note(view)

    def _note(self, view: InstanceView) -> None:
        # The monotonic clock is one for all processes of a machine.
        self._changes.append((time.monotonic(), view.name, view.ready))
