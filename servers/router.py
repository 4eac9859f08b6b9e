"""The router server: read the configuration, build, serve."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from pd_grpc.cli.settings import SettingsError, load_settings
from pd_grpc.engine.load import ModelError, load_tokenizer
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.rpc import PortInUse
from pd_grpc.router.server import start_router
from pd_grpc.telemetry.logs import configure_logging
from pd_grpc.telemetry.tracing import make_provider

EXIT_CONFIGURATION = 2
EXIT_PORT_IN_USE = 3


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    0 after a drain, 2 for a configuration or model that cannot be used, 3 for a port in use. Prints
    `ready router NAME ENDPOINT` on standard output once it answers.
    """
    try:
        config = load_settings(RouterConfig, argv, os.environ)
        configure_logging(config.log_format, config.log_level)
        return asyncio.run(_serve(config))
    except (SettingsError, ModelError) as error:
        print(f"pd-grpc serve router: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except PortInUse as error:
        print(f"pd-grpc serve router: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE


async def _serve(config: RouterConfig) -> int:
    tokenizer = await asyncio.to_thread(
        load_tokenizer, config.engine, config.model, config.sim_vocab
    )
    try:
        provider = make_provider("pd-grpc-router", config.name or "router", config.otlp)
    except RuntimeError as error:
        raise SettingsError(f"otlp: {error}") from None
    router = await start_router(config, tokenizer, tracer_provider=provider)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    print(f"ready router {router.name} {router.endpoint}", flush=True)
    waits = [asyncio.create_task(told.wait()), asyncio.create_task(router.drained.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await router.stop()
    for wait in waits:
        wait.cancel()
    if provider is not None:
        await asyncio.to_thread(provider.shutdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
