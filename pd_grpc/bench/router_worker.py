"""The router as a process of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.router.server import RouterServer, start_router


class RouterWorker:
    """In front of the P and D at the given endpoints."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._config = RouterConfig(
            name="router",
            engine="sim",
            log_level="error",
            prefill=tuple(spec["prefill"]),
            decode=tuple(spec["decode"]),
            request_budget_s=spec["settings"]["request_budget_s"],
        )
        self._server: RouterServer | None = None

    async def start(self) -> Mapping[str, Any]:
        tokenizer = SimTokenizer(self._config.sim_vocab)
        self._server = await start_router(self._config, tokenizer)
        return {"endpoint": self._server.endpoint}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "ready":
            return self._server is not None and self._server.ready
        raise ValueError(f"do: {command['do']!r} is nothing that the router does")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
