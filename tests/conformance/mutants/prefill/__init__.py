"""Every planted fault of P, one file for each part of the conversation, as the cases are."""

from tests.conformance.mutants.prefill import (
    allocate,
    cancellation,
    failures,
    handover,
    kv,
    limits,
    placing,
    refusals,
    sessions,
)
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS

__all__ = [
    "PREFILL_MUTANTS",
    "allocate",
    "cancellation",
    "failures",
    "handover",
    "kv",
    "limits",
    "placing",
    "refusals",
    "sessions",
]
