"""Every planted fault of D, one file for each part of the conversation, as the cases are."""

from tests.conformance.mutants.decode import allocate, allocate_attempts, answers, broken, ends, epochs, first_token, hand_off, heartbeats, hello, layouts, newer_attempts, openings, operator, queue, reopen, sampling, sessions, transfer
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS

__all__ = ["DECODE_MUTANTS", "allocate", "allocate_attempts", "answers", "broken", "ends", "epochs", "first_token", "hand_off", "heartbeats", "hello", "layouts", "newer_attempts", "openings", "operator", "queue", "reopen", "sampling", "sessions", "transfer"]
