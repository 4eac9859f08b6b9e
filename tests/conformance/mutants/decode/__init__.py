"""Every planted fault of D, one file for each part of the conversation, as the cases are."""

from tests.conformance.mutants.decode import openings, reopen, sessions, transfer
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS

__all__ = ["DECODE_MUTANTS", "openings", "reopen", "sessions", "transfer"]
