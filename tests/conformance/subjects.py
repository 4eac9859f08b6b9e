"""Our own servers as subjects of the kit: short times, few blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pd_grpc.decode.server import DecodeServer, start_decode
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_grpc.router.server import RouterServer, start_router

SHORT: dict[str, Any] = {
    "heartbeat_s": 0.4,
    "lease_s": 1.0,
    "grace_s": 0.3,
    "kv_progress_s": 0.5,
    "attach_s": 1.5,
    "first_token_s": 1.8,
    "tombstone_s": 1.8,
}
"""What Welcome announces, so that the kit's waits are short."""

TRIES = 3
"""How often a case may fail before a server that should pass has failed it. Beside other tests a
process may stand still for longer than `SHORT` allows, or what the kit itself announces."""

DECODE: dict[str, Any] = {
    "name": "d",
    "engine": "sim",
    "num_blocks": 64,
    "block_size": 16,
    "max_model_len": 4096,
    "allocate_queue": 64,
    "send_window_bytes": 4096,
    **SHORT,
}


@contextlib.asynccontextmanager
async def decode_server(**settings: Any) -> AsyncIterator[DecodeServer]:
    """A running D."""
    config = DecodeConfig(**{**DECODE, **settings})
    server = await start_decode(config, SimEngine(config))
    try:
        yield server
    finally:
        await server.stop()


PREFILL: dict[str, Any] = {
    "name": "p",
    "engine": "sim",
    "num_blocks": 64,
    "block_size": 16,
    "chunk_tokens": 64,
    "chunk_bytes": 4096,
    "max_model_len": 4096,
}


@contextlib.asynccontextmanager
async def prefill_server(**settings: Any) -> AsyncIterator[PrefillServer]:
    """A running P."""
    config = PrefillConfig(**{**PREFILL, **settings})
    server = await start_prefill(config, SimEngine(config))
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def router_server(
    prefill: str, *decodes: str, **settings: Any
) -> AsyncIterator[RouterServer]:
    """A running router before instances at these endpoints, which leaves when it has drained."""
    config = RouterConfig(
        **{
            "name": "r",
            "prefill": (prefill,),
            "decode": decodes,
            "grace_s": 0.3,
            "settle_s": 0.2,
            **settings,
        }
    )
    server = await start_router(config, SimTokenizer(config.sim_vocab))
    leaving = asyncio.create_task(_leave_when_drained(server))
    try:
        yield server
    finally:
        leaving.cancel()
        await asyncio.wait([leaving])
        await server.stop()


async def _leave_when_drained(server: RouterServer) -> None:
    await server.drained()
    await server.stop()
