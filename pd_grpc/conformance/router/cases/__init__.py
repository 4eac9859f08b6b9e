"""The cases for the router, one file for each part of its work."""

from pd_grpc.conformance.router.cases import (
    admin,
    answer,
    cancellation,
    drain,
    failures,
    intake,
    legs,
    limits,
    losses,
    readiness,
    refusals,
    unknown,
)
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES

__all__ = [
    "ROUTER_CASES",
    "admin",
    "answer",
    "cancellation",
    "drain",
    "failures",
    "intake",
    "legs",
    "limits",
    "losses",
    "readiness",
    "refusals",
    "unknown",
]
