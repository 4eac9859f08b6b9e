"""Packages whose modules register what they define by being imported."""

from __future__ import annotations

import importlib
import pkgutil


def import_modules(package: str) -> None:
    """Import every module that stands directly in a package, which is being imported itself."""
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path, f"{package}."):
        importlib.import_module(module.name)
