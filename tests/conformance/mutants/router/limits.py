"""R82x: limits below the protocol's."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.config import MIB
from pd_grpc.protocol.messages import MAX_TOKENS_PER_MESSAGE
from pd_grpc.protocol.sampling import FieldError, sampling_errors
from pd_grpc.router import intake
from pd_grpc.router.outbox import Outbox
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R821", max_message_bytes=MIB)
def messages_of_one_mebibyte(patch: pytest.MonkeyPatch) -> None:
    """The configuration alone is wrong."""


@mutant("R822")
def the_rest_of_a_large_piece_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = Outbox.take

    def wrong(self):  # type: ignore[no-untyped-def]
        del self._token_ids[MAX_TOKENS_PER_MESSAGE:]
        return right(self)

    patch.setattr(Outbox, "take", wrong)


@mutant("R823")
def fewer_stop_strings(patch: pytest.MonkeyPatch) -> None:
    right = sampling_errors

    def wrong(sampling):  # type: ignore[no-untyped-def]
        few = [] if len(sampling.stop) < 16 else [FieldError("sampling.stop", "too many")]
        return [*right(sampling), *few]

    patch.setattr(intake, "sampling_errors", wrong)
