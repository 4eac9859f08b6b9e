"""The imports of the project keep to the layers of the design."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.import_rules import find_violations

ROOT = Path(__file__).parents[2]


def plant(folder: Path, files: dict[str, str]) -> list[str]:
    """What the checker says of a package that holds these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return find_violations(folder)


def test_the_project_keeps_every_rule() -> None:
    assert find_violations(ROOT / "pd_grpc") == []


@pytest.mark.parametrize(
    ("module", "statement", "says"),
    [
        ("protocol/refs.py", "from pd_grpc.engine import base", "protocol may not import engine"),
        ("protocol/refs.py", "import torch", "torch and transformers belong to pd_grpc.engine"),
        ("v1/extra.py", "import pd_grpc.protocol", "v1 may not import protocol"),
        ("engine/torch.py", "from pd_grpc.blocks.pool import P", "engine may not import blocks"),
        ("transport/inline.py", "import pd_grpc.engine.torch", "transport may not import engine"),
        ("prefill/service.py", "import pd_grpc.decode", "prefill may not import decode"),
        ("router/service.py", "from pd_grpc import cli", "router may not import cli"),
        ("decode/service.py", "from ..router import service", "decode may not import router"),
        ("telemetry/spans.py", "import pd_grpc.protocol", "telemetry imports nothing"),
        ("__init__.py", "from pd_grpc.client import Client", "pd_grpc imports nothing"),
        ("blocks/pool.py", "from grpc import aio", "pd_grpc.blocks knows no gRPC"),
        ("blocks/pool.py", "from pd_grpc.v1 import a_pb2_grpc", "pd_grpc.blocks knows no gRPC"),
        ("router/front.py", "def f():\n    import transformers", "belong to pd_grpc.engine"),
        ("router/front.py", "from pickle import loads", "no pickle anywhere"),
        ("bench/zmq_door.py", "import pickle", "no pickle anywhere"),
        ("prefill/peer.py", "import pd_grpc.bench", "prefill may not import bench"),
        ("misc/odds.py", "import pd_grpc.protocol", "has no place in the layers"),
        ("prefill/machine.py", "import grpc", "the core is sans-IO"),
        ("decode/machine.py", "from time import monotonic", "the core is sans-IO"),
        ("decode/machine.py", "import asyncio.queues", "the core is sans-IO"),
    ],
)
def test_a_planted_violation_is_found(
    module: str, statement: str, says: str, tmp_path: Path
) -> None:
    inner = ("engine/torch.py", "cli/__init__.py", "v1/a_pb2_grpc.py", "router/service.py")
    others = {name: "" for name in inner if name != module}
    (violation,) = plant(tmp_path, {**others, module: statement})
    assert says in violation
    assert (
        f"pd_grpc.{module.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        in violation
    )


def test_the_core_reaches_through_its_siblings_and_the_blocks(tmp_path: Path) -> None:
    violations = plant(
        tmp_path,
        {
            "decode/machine.py": "from pd_grpc.decode import reservations",
            "decode/reservations.py": "from pd_grpc.blocks.leases import LeaseTable",
            "blocks/leases.py": "import threading",
            "decode/service.py": "import asyncio, grpc, threading, time",
        },
    )
    assert violations == ["pd_grpc.blocks.leases:1 imports threading: the core is sans-IO"]


def test_a_linked_folder_is_checked_under_the_name_it_is_imported_by(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "prefill.py").write_text("import torch\n", encoding="utf-8")
    package = tmp_path / "pd_grpc"
    package.mkdir()
    (package / "servers").symlink_to("../servers")
    (violation,) = find_violations(package)
    assert violation.startswith("pd_grpc.servers.prefill:1 imports torch")


def test_what_the_layers_allow_is_not_reported(tmp_path: Path) -> None:
    violations = plant(
        tmp_path,
        {
            "cli/main.py": "import pd_grpc.servers.prefill, pd_grpc.client, grpc, asyncio",
            "bench/zmq_wire.py": "import pickle, pd_grpc.servers.allocator",
            "servers/prefill.py": "from pd_grpc.cli import settings",
            "prefill/service.py": "import pd_grpc.engine.base, pd_grpc.telemetry, grpc, time",
            "prefill/machine.py": "from pd_grpc.protocol import clock",
            "transport/inline.py": "from pd_grpc.engine.base import KvMemory",
            "engine/base.py": "import torch, pd_grpc.telemetry",
            "protocol/clock.py": "import time",
            "protocol/statuses.py": "import grpc, pd_grpc.v1",
            "telemetry/spans.py": "import grpc, opentelemetry.trace",
        },
    )
    assert violations == []
