"""R6xx: a router that says it is ready when it is not, or never again."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router import discovery, server
from pd_grpc.router.admin import RouterAdmin
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.server import SERVICES, RouterServer
from pd_grpc.v1 import admin_pb2, types_pb2
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R601")
def ready_without_prefill(patch: pytest.MonkeyPatch) -> None:
    def wrong(self):  # type: ignore[no-untyped-def]
        return None if self.ready(types_pb2.ROLE_DECODE) else "decode"

    patch.setattr(Discovery, "missing_role", wrong)


@mutant("R602")
def ready_without_decode(patch: pytest.MonkeyPatch) -> None:
    def wrong(self):  # type: ignore[no-untyped-def]
        return None if self.ready(types_pb2.ROLE_PREFILL) else "prefill"

    patch.setattr(Discovery, "missing_role", wrong)


@mutant("R603")
def another_reason_for_want_of_an_instance(patch: pytest.MonkeyPatch) -> None:
    def wrong(role):  # type: ignore[no-untyped-def]
        return Fault(Reason.NO_BLOCKS, f"no {role} instance")

    patch.setattr(discovery, "no_instance", wrong)


@mutant("R604")
def a_lost_instance_stays_ready(patch: pytest.MonkeyPatch) -> None:
    right = Discovery._set

    def wrong(self, view, ready, reason):  # type: ignore[no-untyped-def]
        if ready or reason.startswith("it says"):
            right(self, view, ready, reason)

    patch.setattr(Discovery, "_set", wrong)


@mutant("R605")
def liveness_follows_readiness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server, "SERVICES", ("", *SERVICES))


@mutant("R606")
def not_ready_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = RouterServer._update_readiness

    def wrong(self):  # type: ignore[no-untyped-def]
        was_ready = getattr(self, "was_ready", False)
        self.was_ready = was_ready or self.discovery.missing_role() is None
        if not was_ready or self.discovery.missing_role() is not None:
            right(self)

    patch.setattr(RouterServer, "_update_readiness", wrong)


@mutant("R607")
def reflection_without_a_service(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server, "SERVICES", ("pd_grpc.v1.AdminService",))


@mutant("R608")
def peers_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    async def wrong(self):  # type: ignore[no-untyped-def]
        return [
            admin_pb2.ServerInfo(
                instance=types_pb2.Instance(name=view.name, epoch=view.epoch, role=view.role),
                health=admin_pb2.HEALTH_SERVING,
            )
            for view in self._discovery.instances
        ]

    patch.setattr(RouterAdmin, "peer_infos", wrong)
