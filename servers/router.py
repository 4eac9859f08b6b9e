"""The router server: read the configuration, load the tokenizer, serve."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from pd_grpc.engine.load import load_tokenizer
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.servers import process
from pd_grpc.telemetry.exporting import Telemetry


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit status, see `process.run`."""
    return process.run("router", RouterConfig, argv, start)


async def start(config: RouterConfig, telemetry: Telemetry) -> RouterServer:
    """A router with the configured tokenizer. ModelError when it cannot be loaded."""
    tokenizer = await asyncio.to_thread(
        load_tokenizer, config.engine, config.model, config.sim_vocab
    )
    return await start_router(
        config, tokenizer, tracer_provider=telemetry.tracers, meter_provider=telemetry.meters
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
