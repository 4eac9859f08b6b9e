"""R1xx: requests carried on as something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.router import intake, service
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.outbox import Outbox
from pd_grpc.router.runtime import RoutedCall
from pd_grpc.router.service import RouterService
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R101")
def limits_are_left_out(patch: pytest.MonkeyPatch) -> None:
    right = RouterService.GetModelInfo

    async def wrong(self, request, context):  # type: ignore[no-untyped-def]
        info = await right(self, request, context)
        info.ClearField("max_model_len")
        return info

    patch.setattr(RouterService, "GetModelInfo", wrong)


@mutant("R102")
def the_layout_of_one_instance(patch: pytest.MonkeyPatch) -> None:
    right = Discovery.model

    def wrong(self):  # type: ignore[no-untyped-def]
        model = right(self)
        model.layout.CopyFrom(self.instances[0].model.layout)
        return model

    patch.setattr(Discovery, "model", wrong)


@mutant("R103")
def a_beginning_of_sequence_before_token_ids(patch: pytest.MonkeyPatch) -> None:
    right = intake.tokenize

    async def wrong(request, kind, tokenizer):  # type: ignore[no-untyped-def]
        return [1, *await right(request, kind, tokenizer)]

    patch.setattr(service, "tokenize", wrong)


@mutant("R104")
def the_template_on_plain_text(patch: pytest.MonkeyPatch) -> None:
    right = SimTokenizer.encode

    def wrong(self, text):  # type: ignore[no-untyped-def]
        return right(self, f"user: {text}\nassistant:")

    patch.setattr(SimTokenizer, "encode", wrong)


@mutant("R105")
def messages_without_the_template(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, messages):  # type: ignore[no-untyped-def]
        return self.encode("".join(content for _, content in messages))

    patch.setattr(SimTokenizer, "encode_chat", wrong)


def _fit_with(patch: pytest.MonkeyPatch, change) -> None:  # type: ignore[no-untyped-def]
    """`change` what both legs are to carry, given the request and what should be carried."""
    right = intake.fit

    def wrong(request, *rest):  # type: ignore[no-untyped-def]
        return change(request, right(request, *rest))

    patch.setattr(service, "fit", wrong)


@mutant("R106")
def max_tokens_as_it_was_sent(patch: pytest.MonkeyPatch) -> None:
    def change(request, routable):  # type: ignore[no-untyped-def]
        routable.params.max_tokens = request.sampling.max_tokens
        return routable

    _fit_with(patch, change)


@mutant("R107")
def the_default_does_not_shrink(patch: pytest.MonkeyPatch) -> None:
    def change(request, routable):  # type: ignore[no-untyped-def]
        routable.params.max_tokens = request.sampling.max_tokens or 256
        return routable

    _fit_with(patch, change)


@mutant("R108")
def no_seed_is_minted(patch: pytest.MonkeyPatch) -> None:
    def change(request, routable):  # type: ignore[no-untyped-def]
        if not request.sampling.HasField("seed"):
            routable.params.ClearField("seed")
        return routable

    _fit_with(patch, change)


@mutant("R109")
def a_seed_of_zero_is_none(patch: pytest.MonkeyPatch) -> None:
    def change(request, routable):  # type: ignore[no-untyped-def]
        if not routable.params.seed:
            routable.params.ClearField("seed")
        return routable

    _fit_with(patch, change)


@mutant("R110")
def no_request_id_is_minted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "mint_id", lambda prefix: "")


@mutant("R111")
def request_ids_are_cut(patch: pytest.MonkeyPatch) -> None:
    right = RoutedCall.next_message

    async def wrong(self):  # type: ignore[no-untyped-def]
        message = await right(self)
        if message is not None:
            message.request_id = message.request_id[:64]
        return message

    patch.setattr(RoutedCall, "next_message", wrong)


@mutant("R112")
def earlier_output_is_shown_again(patch: pytest.MonkeyPatch) -> None:
    right = Outbox.__init__

    def wrong(self, tokenizer, sampling, unread, generated=()):  # type: ignore[no-untyped-def]
        right(self, tokenizer, sampling, unread, generated)
        self._token_ids += generated

    patch.setattr(Outbox, "__init__", wrong)


@mutant("R112")
def earlier_output_becomes_prompt(patch: pytest.MonkeyPatch) -> None:
    def change(request, routable):  # type: ignore[no-untyped-def]
        longer = routable.token_ids + routable.generated
        return replace(routable, token_ids=longer, generated=[])

    _fit_with(patch, change)
