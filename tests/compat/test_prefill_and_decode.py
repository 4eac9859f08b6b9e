"""P and D of different ages understand each other or refuse by name, whichever field is missing,
and whatever is said that nobody knows yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.protocol.faults import Fault, Reason, TransportFault
from pd_grpc.v1 import decode_pb2, transfer_pb2
from tests.compat import scenes
from tests.compat.decided import (
    CASES,
    FUTURE,
    LEFT,
    NEVER_AN_ENUM,
    NOT_SENT,
    RIGHT,
    ZERO_IS_A_VALUE,
    Case,
)
from tests.compat.edits import AddUnknown, FutureValue, Strip, fields_of
from tests.compat.scenes import Ended, Play
from tests.prefill.cluster import answer_to

FIELDS = dict(
    fields_of(
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        transfer_pb2.DESCRIPTOR.services_by_name["TransferService"],
    )
)
SCENES: list[Play] = sorted({case.scene for case in CASES}, key=lambda scene: str(scene))


def ended_elsewhere(said: Fault | TransportFault | None) -> bool:
    """Whether D has told P on its control connection that the transfer had failed, which may be
    there before what D says of the reason on the stream of the KV."""
    return (
        isinstance(said, Fault)
        and said.reason is Reason.RELEASED
        and said.metadata.get("state") == "FAILED"
    )


def check(case: Case, ended: Ended) -> None:
    """Both legs ended as was decided, and no token was wrong."""
    said = ended.prefill
    if case.may_work and said is None:
        case = replace(case, prefill=None, client=RIGHT)
    if case.prefill is None:
        assert said is None, f"P: {said}"
    elif not ended_elsewhere(said):
        assert isinstance(said, Fault) and said.reason is case.prefill, f"P: {said}"
        told = f"{said.message} {dict(said.metadata)}"
        assert case.named in told, f"P does not name {case.named}: {told}"
    assert ended.tokens == answer_to(ended.request)[: len(ended.tokens)], "a token is wrong"
    if case.client == RIGHT:
        assert ended.right, f"client: {ended}"
    elif case.client == LEFT:
        assert ended.left
    elif case.client is None:
        assert ended.left or isinstance(ended.client, Fault), f"client: {ended}"
    else:
        assert isinstance(ended.client, Fault) and ended.client.reason is case.client


def test_of_every_field_it_is_decided_what_its_absence_means() -> None:
    decided = {case.field for case in CASES} | set(NOT_SENT) | set(ZERO_IS_A_VALUE)
    assert decided == set(FIELDS)
    assert not {case.field for case in CASES} & set(NOT_SENT)


def test_of_every_enum_it_is_decided_what_an_unknown_value_means() -> None:
    enums = {name for name, field in FIELDS.items() if field.enum_type is not None}
    assert {case.field for case in FUTURE} | set(NEVER_AN_ENUM) == enums


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_peer_that_leaves_a_field_out_is_understood_or_refused_by_name(case: Case) -> None:
    strip = Strip(case.field)
    ended = await case.scene(strip)
    assert strip.met, f"{case.field} was never there to be left out"
    check(case, ended)


@pytest.mark.parametrize("case", FUTURE, ids=str)
async def test_a_value_that_nobody_knows_yet_is_refused_by_name_or_no_matter(case: Case) -> None:
    future = FutureValue(case.field)
    ended = await case.scene(future)
    assert future.met
    check(case, ended)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_fields_that_nobody_knows_yet_change_nothing(scene: Play) -> None:
    usual = Case("", scene)
    if scene is scenes.client_gone:
        usual = next(case for case in CASES if case.field == "TransferEnded.ref")
    elif scene is scenes.caller_gone:
        usual = next(case for case in CASES if case.field == "ReleaseResponse.state")
    unknown = AddUnknown()
    ended = await scene(unknown)
    assert {"Hello", "Welcome", "AllocateRequest", "AllocateResponse"} <= unknown.met
    check(usual, ended)
    # A heartbeat may come just while D decodes.
    assert unknown.fields & set(NOT_SENT) <= {"Load.decoding_requests"}


async def test_a_token_left_out_is_token_0() -> None:
    ended = await scenes.plain(Strip("FirstToken.token_id"))
    assert ended.client is None and ended.tokens[0] == 0


async def test_a_log_probability_left_out_is_certainty() -> None:
    ended = await scenes.with_logprobs(Strip("TokenLogprob.logprob"))
    assert ended.client is None and ended.tokens == answer_to(ended.request)
    assert ended.logprobs[0].chosen.logprob == 0
