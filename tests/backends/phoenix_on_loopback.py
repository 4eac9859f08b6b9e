"""`phoenix serve` with its OTLP port bound to loopback. Run by the interpreter of .venv-phoenix.

Phoenix has a setting for the address of its page alone; its OTLP port would be open to everybody.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc.aio
from phoenix.server.main import main

_make_server = grpc.aio.server


def _server_on_loopback(*args: Any, **kwargs: Any) -> Any:
    server: Any = _make_server(*args, **kwargs)
    bind = server.add_insecure_port
    server.add_insecure_port = lambda where: bind(f"127.0.0.1:{where.rpartition(':')[2]}")
    return server


if __name__ == "__main__":
    grpc.aio.server = _server_on_loopback
    sys.argv = ["phoenix", "serve"]
    main()
