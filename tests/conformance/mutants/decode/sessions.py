"""D1xx: sessions gone wrong."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.leases import Leases
from pd_grpc.decode.sessions import Sessions
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D101")
def welcome_without_a_session_id(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._welcome

    def wrong(self, session):  # type: ignore[no-untyped-def]
        welcome = right(self, session)
        welcome.session_id = ""
        return welcome

    patch.setattr(Sessions, "_welcome", wrong)


@mutant("D110")
def heartbeats_renew_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "renew", lambda self, grant_id, now: True)
