"""The version of this distribution."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("pd-grpc")
