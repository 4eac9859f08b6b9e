"""What D says of itself in its Welcome, and what P makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import decode_pb2, layout_pb2, sampling_pb2, types_pb2
from tests.prefill.world import D1, D2, GONE, World, settle

T1 = TransferKey("t-1", 1)


@pytest.mark.parametrize(
    ("transport", "named"), [(layout_pb2.TRANSPORT_NIXL, "TRANSPORT_NIXL"), (99, "99")]
)
def test_a_transport_that_was_not_offered_is_turned_down(
    world: World, transport: layout_pb2.Transport, named: str
) -> None:
    call = world.call(decodes=(D1, D2))
    world.connect(D1, transport=transport)
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D2, transport=transport)
    fault = world.fault(call)
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert (fault.metadata["field"], fault.metadata["theirs"]) == ("transport", named)


def test_a_transport_that_is_not_named_is_inline(world: World) -> None:
    world.call()
    world.connect(D1, transport=layout_pb2.TRANSPORT_UNSPECIFIED)
    response = decode_pb2.AllocateResponse(
        grant_id="g",
        wanted=[types_pb2.BlockRange(start=0, count=2)],
        shards=[layout_pb2.Shard(endpoint="x:1")],
    )
    world.feed(ev.AllocateAnswered(world.ask(), response, None))
    assert world.state() is PrefillState.COMPUTING


def test_a_welcome_of_another_instance_says_who_was_meant_and_who_is_there(world: World) -> None:
    call = world.call(decode_name="d9")
    world.connect(D1)
    fault = world.fault(call)
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": "d9", "here": "d1"}


@pytest.mark.parametrize("feature", ["grant_needs_client", "first_token_by_decode"])
def test_a_d_that_asks_for_what_is_reserved_is_turned_down(world: World, feature: str) -> None:
    call = world.call(decodes=(D1, D2))
    world.connect(D1, **{feature: True})
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D2, **{feature: True})
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["feature"]) == (Reason.FEATURE, f"welcome.{feature}")


@pytest.mark.parametrize(
    ("welcome", "named"),
    [
        ({"session_id": ""}, "session_id"),
        ({"instance": types_pb2.Instance(name="d1")}, "instance.epoch"),
        ({"instance": types_pb2.Instance(epoch=5)}, "instance.name"),
    ],
)
def test_a_welcome_without_what_every_call_needs_is_turned_down(
    world: World, welcome: dict[str, Any], named: str
) -> None:
    call = world.call()
    world.connect(D1, **welcome)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["field"]) == (Reason.WRONG_STATE, f"welcome.{named}")
    assert world.taken(act.SendAllocate) == []


@pytest.mark.parametrize("fields", [{}, {"kv_format": "canonical"}])
def test_bytes_are_canonical_where_d_does_not_say_otherwise(
    world: World, fields: dict[str, Any]
) -> None:
    world.call()
    world.connect(D1, **fields)
    assert world.ask().endpoint == D1


def test_a_format_that_is_not_ours_is_turned_down(world: World) -> None:
    call = world.call()
    world.connect(D1, kv_format="another")
    fault = world.fault(call)
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata == {"field": "kv_format", "ours": "canonical", "theirs": "another"}
    assert world.taken(act.SendAllocate) == []


def test_a_hello_that_d_finds_malformed_is_no_mistake_of_the_client(world: World) -> None:
    call = world.call()
    world.break_session(fault=bad_request([FieldError("hello.layouts", "must have at least one")]))
    fault = world.fault(call)
    assert fault.reason is Reason.WRONG_STATE
    assert "hello.layouts" in fault.message


def test_p_lists_what_its_engine_can_do() -> None:
    world = World(features=("logprobs",))
    world.call()
    assert list(world.taken(act.OpenSession)[0].hello.features) == ["logprobs"]
    settle(world)


def test_logprobs_go_to_a_d_that_has_them() -> None:
    world = World(features=("logprobs",))
    sampling = sampling_pb2.SamplingParams(logprobs=2)
    call = world.call(decodes=(D1, D2), sampling=sampling)
    world.connect(D1)
    assert world.emitted(call) == ["queued", "placing"]
    world.connect(D2, features=["logprobs"])
    assert world.ask().endpoint == D2
    settle(world)


def test_logprobs_that_no_d_has_are_refused_by_name_without_asking() -> None:
    world = World(features=("logprobs",))
    call = world.call(sampling=sampling_pb2.SamplingParams(logprobs=2))
    world.connect(D1)
    fault = world.fault(call)
    assert (fault.reason, fault.metadata["feature"]) == (Reason.FEATURE, "sampling.logprobs")
    assert world.taken(act.SendAllocate) == []
    assert world.releases() == [(D1, Reason.FEATURE)]
    settle(world)


def test_more_than_ds_model_takes_is_refused_without_asking(world: World) -> None:
    fits = world.call("t-1", tokens=20, max_tokens=16)
    over = world.call("t-2", tokens=21, max_tokens=16)
    world.connect(max_model_len=36)
    assert world.emitted(fits) == ["queued"]
    fault = world.fault(over)
    assert fault.reason is Reason.TOO_LARGE
    assert (fault.metadata["needed"], fault.metadata["total"]) == ("37", "36")
    assert [asked.key.transfer_id for asked in world.taken(act.SendAllocate)] == ["t-1"]


def test_a_d_in_use_by_another_address_is_turned_down_for_it_would_end_that_session() -> None:
    world = World()
    first = world.bring_to(PrefillState.COMPUTING)
    world.decodes[D2] = world.decodes[D1]
    second = world.call("t-2", decodes=(D2,))
    world.connect(D2)
    fault = world.fault(second)
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": D2, "here": D1}
    # D took the newer session for the older one's successor; the older one comes back.
    world.break_session(D1, Fault(Reason.SUPERSEDED, "a newer session took over"))
    world.advance(0.1)
    world.connect(D1)
    world.step()
    world.step()
    world.answer_first_token()
    world.complete()
    assert world.emitted(first)[-1] == "OK"
    settle(world)


def test_an_address_that_nobody_uses_any_more_gives_way_to_another() -> None:
    world = World()
    world.call("t-1")
    world.connect(D1)
    world.refuse(Fault(Reason.RELEASED, "over"))
    world.decodes[D2] = world.decodes[D1]
    world.call("t-2", decodes=(D2,))
    world.connect(D2)
    assert world.state("t-2") is PrefillState.ALLOCATING
    assert [forget.endpoint for forget in world.taken(act.ForgetDecode)] == [D1]
    settle(world)


def test_the_patience_with_a_shard_is_what_d_says() -> None:
    world = World(kv_progress_s=10)
    call = world.call()
    world.connect(kv_progress=duration(3))
    world.grant()
    assert world.taken(act.OpenTransfer)[-1].progress_s == 3
    world.step()
    world.answer_first_token()
    world.feed(ev.TransferBroken(T1, 0, GONE))
    for _ in range(4):
        world.say(heartbeat_ack=decode_pb2.HeartbeatAck())
        assert not world.state().terminal
        world.feed(ev.TransferReopened(T1, 0))
        world.advance(0.8)
        if not world.state().terminal:
            world.feed(ev.TransferBroken(T1, 0, GONE))
    world.advance(0)
    assert world.fault(call).reason is Reason.DECODE_LOST
    settle(world)
