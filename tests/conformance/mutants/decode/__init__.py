"""Every planted fault of D, one file for each part of the conversation, as the cases are."""

from tests.conformance.mutants.decode import (
    answers,
    broken,
    epochs,
    first_token,
    hand_off,
    heartbeats,
    hello,
    layouts,
    openings,
    reopen,
    sessions,
    transfer,
)
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS

__all__ = [
    "DECODE_MUTANTS",
    "answers",
    "broken",
    "epochs",
    "first_token",
    "hand_off",
    "heartbeats",
    "hello",
    "layouts",
    "openings",
    "reopen",
    "sessions",
    "transfer",
]
