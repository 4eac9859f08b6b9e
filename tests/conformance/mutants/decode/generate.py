"""D65x and D66x: a D that takes any client's leg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_grpc.decode import checks
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before_generate(
    patch: pytest.MonkeyPatch, spoil: Callable[[inference_pb2.GenerateRequest], None]
) -> None:
    """Let `spoil(request)` before a client's leg is looked at."""
    right = ClientDesk.generate

    def wrong(self, event):  # type: ignore[no-untyped-def]
        spoil(event.request)
        right(self, event)

    patch.setattr(ClientDesk, "generate", wrong)


def epochs_are_checked(patch: pytest.MonkeyPatch, *, strictly: bool) -> None:
    """Take every epoch, or none but D's."""
    right = checks.check_ref

    def wrong(ref: types_pb2.TransferRef, here: types_pb2.Instance, any_epoch: bool) -> None:
        if not strictly:
            ref.decode_epoch = here.epoch
        right(ref, here, False)

    patch.setattr(checks, "check_ref", wrong)


def nothing_is_wrong(*_: Any) -> list[Any]:
    """What a check says that looks at nothing."""
    return []


@mutant("D650")
def any_name_is_ours(patch: pytest.MonkeyPatch) -> None:
    before_generate(patch, lambda request: request.handoff.ClearField("decode_name"))


@mutant("D651")
def clients_must_know_the_epoch(patch: pytest.MonkeyPatch) -> None:
    epochs_are_checked(patch, strictly=True)


@mutant("D652")
def any_epoch_of_a_client_is_ours(patch: pytest.MonkeyPatch) -> None:
    epochs_are_checked(patch, strictly=False)


@mutant("D653")
def text_is_read_as_bytes(patch: pytest.MonkeyPatch) -> None:
    def spoil(request: inference_pb2.GenerateRequest) -> None:
        if request.WhichOneof("prompt") in ("text", "messages"):
            request.token_ids.ids.extend(b"hello")

    before_generate(patch, spoil)


@mutant("D654")
def no_prompt_is_a_prompt(patch: pytest.MonkeyPatch) -> None:
    def spoil(request: inference_pb2.GenerateRequest) -> None:
        if not request.token_ids.ids:
            request.token_ids.ids.append(1)

    before_generate(patch, spoil)


@mutant("D655")
def token_ids_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pd_grpc.decode.checks.token_errors", nothing_is_wrong)


@mutant("D656", "D657")
def sampling_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pd_grpc.decode.checks.sampling_errors", nothing_is_wrong)


@mutant("D658")
def output_given_is_cut(patch: pytest.MonkeyPatch) -> None:
    def spoil(request: inference_pb2.GenerateRequest) -> None:
        del request.generated_token_ids[request.sampling.max_tokens - 1 :]

    before_generate(patch, spoil)


@mutant("D659")
def names_are_not_measured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pd_grpc.decode.checks.name_errors", nothing_is_wrong)


@mutant("D660")
def the_pool_is_not_measured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "check_blocks", nothing_is_wrong)


@mutant("D661")
def the_model_is_not_measured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "check_length", nothing_is_wrong)
