"""Where the cases for the router are registered."""

from __future__ import annotations

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.router.subject import RouterHand

ROUTER_CASES: Cases[RouterHand] = Cases("R")
