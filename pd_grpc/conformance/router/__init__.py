"""Judging a router, before the kit's own P and D."""

from pd_grpc.conformance.router.cases import ROUTER_CASES
from pd_grpc.conformance.router.instance import open_instances
from pd_grpc.conformance.router.subject import RouterHand, open_router

__all__ = ["ROUTER_CASES", "RouterHand", "open_instances", "open_router"]
