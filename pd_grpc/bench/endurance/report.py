"""What every report of a long run says of where it was made."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

_PACKAGES = ("pd-grpc", "grpcio", "protobuf")


def made_on() -> dict[str, Any]:
    """Versions and machine."""
    return {
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "load_average": os.getloadavg(),
    }
