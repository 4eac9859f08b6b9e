"""Which module may import which: the layers of the design, read from the syntax trees.

Imports inside functions and under TYPE_CHECKING count like any other. Code is read and never run,
so that a module is checked whether or not what it needs is installed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "pd_grpc"

# From the top down; a part may import those below its row. Parts of one row are independent of each
# other, but for the top one, where the servers read their settings, the command starts servers and
# benchmarks, and those run servers.
LAYERS = (
    ("servers", "cli", "bench"),
    ("testing",),
    ("client", "conformance", "prefill", "decode", "router"),
    ("engine", "transport", "blocks"),
    ("protocol",),
    ("v1",),
)
TOP = frozenset(LAYERS[0])
# Used by all, and importing none of them.
TELEMETRY = "telemetry"
# The exceptions to independence: a transport moves bytes out of and into the memory that the
# engine's contract describes.
ALLOWED = frozenset({("transport", "pd_grpc.engine.base")})

GRPC = frozenset({"grpc", "grpc_status", "grpc_health", "grpc_reflection", "grpc_channelz"})
TORCH = frozenset({"torch", "transformers", "safetensors", "gguf"})
PICKLE = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
# What the benchmark compares with; it talks to processes it has started itself, and on loopback.
PICKLE_ALLOWED = frozenset({"pd_grpc.bench.zmq_wire"})
IO = frozenset(
    {"asyncio", "concurrent", "multiprocessing", "selectors", "signal", "socket"}
    | {"subprocess", "threading", "time"}
)

# The sans-IO core, with the modules of their own package that these import and pd_grpc.blocks.
CORE = (
    "pd_grpc.prefill.machine",
    "pd_grpc.prefill.sender",
    "pd_grpc.decode.machine",
    "pd_grpc.decode.receiver",
    "pd_grpc.router.machine",
    "pd_grpc.router.recovery",
    "pd_grpc.router.policies",
)


@dataclass(frozen=True)
class Import:
    """One import statement's target, as `a.b.c` even where it is written `from a.b import c`."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def find_violations(folder: Path) -> list[str]:
    """The broken rules of the package in `folder`, one line each; empty when all hold."""
    modules = _modules(folder)
    imports = {name: list(_imports(name, path, modules)) for name, path in modules.items()}
    everything = [found for each in imports.values() for found in each]
    return [
        *(f"{found}: {why}" for found in everything if (why := _breaks_a_layer(found))),
        *(f"{found}: {why}" for found in everything if (why := _is_foreign(found))),
        *_core_violations(imports),
    ]


def part_of(module: str) -> str:
    """`prefill` for `pd_grpc.prefill.machine`, and nothing for the package itself."""
    return module.split(".")[1] if "." in module else ""


def _breaks_a_layer(found: Import) -> str | None:
    if _top_level(found.target) != PACKAGE:
        return None
    importer, imported = part_of(found.module), part_of(found.target)
    if importer == imported or imported == TELEMETRY != importer != "":
        return None
    if (importer, found.target) in ALLOWED or {importer, imported} <= TOP:
        return None
    if importer in ("", TELEMETRY):
        return f"{importer or PACKAGE} imports nothing of the package"
    rows = {part: row for row, parts in enumerate(LAYERS) for part in parts}
    if importer not in rows or imported not in rows:
        return "it has no place in the layers"
    if rows[importer] < rows[imported]:
        return None
    return f"{importer} may not import {imported}"


def _is_foreign(found: Import) -> str | None:
    top, part = _top_level(found.target), part_of(found.module)
    if top in PICKLE and found.module not in PICKLE_ALLOWED:
        return "no pickle anywhere"
    if top in TORCH and part != "engine":
        return "torch and transformers belong to pd_grpc.engine"
    if part == "blocks" and _is_grpc(found.target):
        return "pd_grpc.blocks knows no gRPC"
    return None


def _core_violations(imports: Mapping[str, Iterable[Import]]) -> Iterator[str]:
    """What the machines, and what they import of their own package and of blocks, must not."""
    waiting = [module for module in CORE if module in imports]
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        for found in imports[module]:
            if _is_grpc(found.target) or _top_level(found.target) in IO:
                yield f"{found}: the core is sans-IO"
            near = part_of(found.target) in (part_of(module), "blocks")
            if near and found.target in imports and found.target not in seen:
                seen.add(found.target)
                waiting.append(found.target)


def _is_grpc(target: str) -> bool:
    return _top_level(target) in GRPC or target.endswith("_pb2_grpc")


def _top_level(module: str) -> str:
    return module.split(".")[0]


def _modules(folder: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name. `pd_grpc/servers` is a link, so follow it."""
    found: dict[str, Path] = {}
    for parent, _, files in os.walk(folder, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(parent, file)
                parts = path.relative_to(folder).with_suffix("").parts
                dotted = [PACKAGE, *(part for part in parts if part != "__init__")]
                found[".".join(dotted)] = path
    return found


def _imports(module: str, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, path)
            for alias in node.names:
                dotted = f"{base}.{alias.name}"
                is_module = dotted in modules or _top_level(base) != PACKAGE
                yield Import(module, dotted if is_module else base, node.lineno)


def _base(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The module of `from X import ...`, with a relative X made absolute."""
    if not node.level:
        return node.module or ""
    up = node.level - (path.name == "__init__.py")
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])
