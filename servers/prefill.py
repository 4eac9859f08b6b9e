"""The prefill server: read the configuration, load the engine, serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pd_grpc.engine.load import load_engine
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.servers import process
from pd_grpc.telemetry.exporting import Telemetry


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit status, see `process.run`."""
    return process.run("prefill", PrefillConfig, argv, start)


async def start(config: PrefillConfig, telemetry: Telemetry) -> PrefillServer:
    """A P over the configured engine. ModelError when it cannot be loaded."""
    engine = await process.load(lambda: load_engine(config, process.progress))
    return await start_prefill(
        config, engine, tracer_provider=telemetry.tracers, meter_provider=telemetry.meters
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
