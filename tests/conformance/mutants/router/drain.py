"""R9xx: a router that leaves badly."""

from __future__ import annotations

import pytest

from pd_grpc.router.runtime import RoutedCall
from pd_grpc.router.server import RouterServer
from pd_grpc.router.service import RouterService
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R901")
def what_is_left_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutedCall, "fail", lambda self, fault: None)


@mutant("R901")
def new_requests_are_taken(patch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(RouterService, "draining", never, raising=False)


@mutant("R901")
def what_runs_is_not_finished(patch: pytest.MonkeyPatch) -> None:
    right = RouterServer.drain
    patch.setattr(RouterServer, "drain", lambda self, deadline_s=None: right(self, 0.0))
