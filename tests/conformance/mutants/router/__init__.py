"""Every planted fault of the router, one file for each part of its work, as the cases are."""

from tests.conformance.mutants.router import (
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
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS

__all__ = [
    "ROUTER_MUTANTS",
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
