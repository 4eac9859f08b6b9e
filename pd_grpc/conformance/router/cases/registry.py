"""Where the cases for the router are registered."""

from __future__ import annotations

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.router.subject import Router

ROUTER_CASES: Cases[Router] = Cases("R")
