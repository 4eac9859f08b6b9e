"""R22x: choices that are not told apart, not counted, or missed by nobody."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.choices import choice_seed
from pd_grpc.router import intake
from pd_grpc.router.choices import Choices
from pd_grpc.router.fan_out import FanOut
from pd_grpc.router.intake import RoutableRequest
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS as mutant


@mutant("R221")
def the_legs_ask_for_several_too(patch: pytest.MonkeyPatch) -> None:
    right = RoutableRequest.of_choice

    def wrong(self, choice):  # type: ignore[no-untyped-def]
        one = right(self, choice)
        one.params.n = self.choices
        return one

    patch.setattr(RoutableRequest, "of_choice", wrong)


@mutant("R222")
def seeds_are_counted_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "choice_seed", lambda seed, choice: seed + choice)


@mutant("R222")
def seeds_are_counted_from_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "choice_seed", lambda seed, choice: choice_seed(seed, choice + 1))


@mutant("R222")
def choices_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    right = FanOut._message_of

    def wrong(self, number):  # type: ignore[no-untyped-def]
        message = right(self, number)
        message.choice = 0
        return message

    patch.setattr(FanOut, "_message_of", wrong)


@mutant("R223")
def the_prompt_is_counted_each_time(patch: pytest.MonkeyPatch) -> None:
    right = Choices.said_all

    def wrong(self, choice, usage):  # type: ignore[no-untyped-def]
        counted = self.total.prompt_tokens
        right(self, choice, usage)
        self.total.prompt_tokens = counted + usage.prompt_tokens

    patch.setattr(Choices, "said_all", wrong)


@mutant("R224")
def one_that_fails_is_left_out(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, number):  # type: ignore[no-untyped-def]
        self._rules._count -= 1

    patch.setattr(FanOut, "_fail", wrong)


@mutant("R225")
def as_many_as_anybody_likes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intake, "choices_errors", lambda params: [])
