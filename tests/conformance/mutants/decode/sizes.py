"""D82x: a D with the wrong limits."""

from __future__ import annotations

import re
from itertools import count

import pytest

from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.protocol import messages, refs
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant

MIB = 1 << 20


@mutant("D820", max_message_bytes=64 * MIB)
def larger_messages_are_taken(patch: pytest.MonkeyPatch) -> None:
    """By its configuration."""


@mutant("D821", max_message_bytes=MIB)
def a_long_prompt_is_too_many_bytes(patch: pytest.MonkeyPatch) -> None:
    """By its configuration."""


@mutant("D822")
def acks_name_a_thousand_grants(patch: pytest.MonkeyPatch) -> None:
    right, seen = SessionDesk._renew, count()

    def wrong(self, session, grant_id):  # type: ignore[no-untyped-def]
        return right(self, session, grant_id) or next(seen) > 1000

    patch.setattr(SessionDesk, "_renew", wrong)


@mutant("D823")
def transfer_ids_are_cut_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refs, "_TRANSFER_ID", re.compile(r"[A-Za-z0-9._:-]{1,127}"))


@mutant("D824")
def seconds_have_32_bits(patch: pytest.MonkeyPatch) -> None:
    right = messages.seconds

    def wrong(value):  # type: ignore[no-untyped-def]
        return (right(value) + 2**31) % 2**32 - 2**31

    patch.setattr("pd_grpc.decode.prefill_desk.seconds", wrong)
