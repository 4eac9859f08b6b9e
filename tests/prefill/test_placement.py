"""How a request finds a D, and turns to another."""

from __future__ import annotations

import pytest

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2
from tests.prefill.world import D1, D2, GONE, World

REFUSALS = [
    (Fault(Reason.NO_BLOCKS, "full", quota=Quota(3, 1)), True),
    (Fault(Reason.QUEUE_FULL, "full"), True),
    (Fault(Reason.DRAINING, "leaving"), True),
    (Fault(Reason.STALE_EPOCH, "older"), True),
    (Fault(Reason.WRONG_INSTANCE, "other"), True),
    (GONE, True),
    (TransportFault(Code.CANCELLED, "it stops"), True),
    (Fault(Reason.TOO_LARGE, "never fits"), False),
    (Fault(Reason.RELEASED, "ended"), False),
    (Fault(Reason.HANDOFF_MISMATCH, "sampling"), False),
    (Fault(Reason.DUPLICATE_TRANSFER, "another body"), False),
    (TransportFault(Code.INTERNAL, "a bug"), False),
    (TransportFault(Code.RESOURCE_EXHAUSTED, "message too large"), False),
]


@pytest.mark.parametrize(("fault", "helps"), REFUSALS)
def test_another_d_is_asked_where_that_can_help(
    world: World, fault: Fault | TransportFault, helps: bool
) -> None:
    call = world.call(decodes=(D1, D2))
    world.connect(D1)
    world.refuse(fault)
    if not helps:
        assert world.emitted(call)[1:2] == [world.fault(call).reason.name]
        return
    # The caller hears of it before the other D is even connected to.
    order = [a for a in world.actions if isinstance(a, act.Emit | act.OpenSession)]
    assert [type(a) for a in order[-2:]] == [act.Emit, act.OpenSession]
    placing = world.taken(act.Emit)[-1].response.placing
    assert placing.decode.endpoint == D2
    world.connect(D2)
    world.grant()
    world.step()
    world.answer_first_token()
    world.complete()
    assert world.emitted(call) == ["queued", "placing", "progress", "handed_off", "OK"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (GONE, Reason.DECODE_LOST),
        (TransportFault(Code.DEADLINE_EXCEEDED, "late"), Reason.STAGE_DEADLINE),
        (TransportFault(Code.RESOURCE_EXHAUSTED, "16 MiB"), Reason.TOO_LARGE),
        (TransportFault(Code.UNIMPLEMENTED, "no such method"), Reason.WRONG_INSTANCE),
        (TransportFault(Code.CANCELLED, "reset"), Reason.DECODE_LOST),
    ],
)
def test_an_allocate_that_d_did_not_answer_is_given_back(
    world: World, fault: TransportFault, reason: Reason
) -> None:
    call = world.call()
    world.connect()
    world.refuse(fault)
    assert world.fault(call).reason is reason
    assert world.releases() == [(D1, reason)]


def test_the_client_leg_of_the_d_that_refused_last_is_told(world: World) -> None:
    """It waits for this transfer, and none but P knows that it will not come."""
    call = world.call(decodes=(D1, D2))
    world.connect(D1)
    world.refuse(Fault(Reason.NO_BLOCKS, "full", quota=Quota(3, 1)))
    assert world.releases() == []
    world.connect(D2)
    world.refuse(Fault(Reason.QUEUE_FULL, "full"))
    assert world.fault(call).reason is Reason.QUEUE_FULL
    assert world.releases() == [(D2, Reason.QUEUE_FULL)]


def test_a_d_that_drains_is_told_too(world: World) -> None:
    world.call("t-1")
    world.connect()
    world.say(drain=decode_pb2.Drain())
    call = world.call("t-2")
    assert world.fault(call).reason is Reason.DRAINING
    assert world.releases() == [(D1, Reason.DRAINING)]


@pytest.mark.parametrize(
    "reason",
    [
        Reason.DUPLICATE_TRANSFER,
        Reason.NOT_OWNER,
        Reason.STALE_ATTEMPT,
        Reason.SUPERSEDED,
        Reason.RELEASED,
        Reason.STALE_EPOCH,
        Reason.WRONG_INSTANCE,
    ],
)
def test_a_transfer_that_is_anothers_or_over_is_left_alone(world: World, reason: Reason) -> None:
    call = world.call()
    world.connect()
    world.refuse(Fault(reason, "not yours"))
    assert world.fault(call).reason is reason
    assert world.releases() == []


def test_a_d_hears_of_an_end_that_its_waiting_client_cannot_know_of() -> None:
    """P has not asked D for anything yet, and the client's leg may be there all the same."""
    world = World(prepare_window=1)
    world.bring_to(PrefillState.ALLOCATING)
    waits, leaves = world.call("t-2"), world.call("t-3")
    late = world.call("t-4", budget_s=1.0)
    world.feed(ev.PrefillCallEnded(leaves))
    world.advance(1.0)
    assert world.fault(late).reason is Reason.STAGE_DEADLINE
    assert world.releases() == [], "client and D see to these themselves"
    world.feed(ev.DrainRequested(0))
    assert world.fault(waits).reason is Reason.DRAINING
    told = {release.key.transfer_id for release in world.taken(act.SendRelease)}
    assert told == {"t-1", "t-2"}


def test_a_d_that_was_never_reached_is_told_nothing(world: World) -> None:
    call = world.call()
    world.break_session()
    assert world.fault(call).reason is Reason.DECODE_LOST
    assert world.releases() == []


def test_the_prompts_digest_is_made_once_for_every_d(world: World) -> None:
    world.call(decodes=(D1, D2), tokens=9)
    record = world.machine.requests.in_flight[TransferKey("t-1", 1)]
    made = record.prompt_digest
    world.connect(D1)
    world.refuse(Fault(Reason.QUEUE_FULL, "full"))
    world.connect(D2)
    assert record.prompt_digest is made
    assert [a.request.prompt_digest for a in world.taken(act.SendAllocate)] == [made, made]


def test_a_lost_answer_is_given_back_before_another_d_is_asked(world: World) -> None:
    world.call(decodes=(D1, D2))
    world.connect(D1)
    world.refuse(GONE)
    assert world.releases() == [(D1, Reason.RELEASED)]


def test_a_d_that_refuses_the_connection_fails_its_requests_at_once(world: World) -> None:
    calls = [world.call(f"t-{n}") for n in range(3)]
    world.break_session()
    assert [world.fault(call).reason for call in calls] == [Reason.DECODE_LOST] * 3
    assert [forget.endpoint for forget in world.taken(act.ForgetDecode)] == [D1]


def test_a_d_that_never_answers_is_given_up_after_connect_s(world: World) -> None:
    call = world.call()
    world.advance(1.9)
    assert world.state() is PrefillState.QUEUED
    world.advance(0.2)
    assert world.fault(call).reason is Reason.DECODE_LOST
    (closed,) = world.taken(act.CloseSession)
    assert not closed.graceful


def test_a_d_with_another_layout_fails_its_requests_with_the_field(world: World) -> None:
    call = world.call()
    said = Fault(Reason.LAYOUT_MISMATCH, "block_size differs", {"field": "block_size"})
    world.break_session(fault=said)
    assert world.fault(call).metadata["field"] == "block_size"


def test_a_welcome_with_another_layout_is_turned_down(world: World) -> None:
    call = world.call()
    welcome = world.decodes[D1].welcome()
    welcome.welcome.layout.groups[0].planes[1].heads = 2
    (opened,) = world.taken(act.OpenSession)
    world.feed(ev.SessionMessage(D1, opened.link, welcome))
    fault = world.fault(call)
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata["field"] == "groups[0].planes[1].heads"


def test_a_request_that_names_another_than_the_one_in_session_is_told_both(world: World) -> None:
    world.call("t-1")
    world.connect()
    named = world.call("t-2", decode_name="d9")
    fault = world.fault(named)
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": "d9", "here": "d1"}


def test_another_instance_behind_the_address_fails_only_those_who_name_one(world: World) -> None:
    named = world.call("t-1", decode_name="d9")
    any_ = world.call("t-2")
    world.break_session(fault=Fault(Reason.WRONG_INSTANCE, "this is d1"))
    assert world.fault(named).reason is Reason.WRONG_INSTANCE
    assert world.taken(act.OpenSession)[-1].hello.decode_name == ""
    world.connect()
    assert world.state("t-2") is PrefillState.ALLOCATING
    assert world.emitted(any_) == ["queued"]


def test_a_name_that_is_not_ds_is_refused_without_asking(world: World) -> None:
    world.call("t-1")
    world.connect()
    call = world.call("t-2", decode_name="d9")
    assert world.fault(call).reason is Reason.WRONG_INSTANCE
    assert [asked.key.transfer_id for asked in world.taken(act.SendAllocate)] == ["t-1"]


def test_a_draining_d_is_not_asked(world: World) -> None:
    world.call("t-1")
    world.connect()
    world.say(drain=decode_pb2.Drain())
    call = world.call("t-2", decodes=(D1, D2))
    assert world.emitted(call) == ["queued", "placing"]
    assert [a.endpoint for a in world.taken(act.OpenSession)] == [D1, D2]


def test_a_d_that_says_goodbye_is_lost_at_once(world: World) -> None:
    granted = world.bring_to(PrefillState.COMPUTING)
    asking = world.call("t-2", decodes=(D1, D2))
    world.say(goodbye=decode_pb2.Goodbye(reason="upgrade"))
    fault = world.fault(granted)
    assert fault.reason is Reason.DECODE_LOST and "upgrade" in fault.message
    assert world.emitted(asking) == ["queued", "placing"]
    assert [a.key.transfer_id for a in world.taken(act.CancelAllocate)] == ["t-2"]


def test_a_session_renewed_under_an_allocate_asks_again_in_the_new_name(world: World) -> None:
    world.bring_to(PrefillState.ALLOCATING)
    world.break_session()
    world.advance(0.1)
    world.connect()
    world.refuse(Fault(Reason.NO_SESSION, "unknown session"))
    first, second = world.taken(act.SendAllocate)
    assert (first.request.session_id, second.request.session_id) == ("d1-s1", "d1-s2")
    assert second.link > first.link


def test_an_allocate_refused_before_the_new_session_is_there_asks_again_then(
    world: World,
) -> None:
    world.bring_to(PrefillState.ALLOCATING)
    world.break_session()
    world.refuse(Fault(Reason.NO_SESSION, "unknown session"))
    assert world.state() is PrefillState.QUEUED
    world.advance(0.1)
    world.connect()
    assert world.ask().request.session_id == "d1-s2"


def test_a_d_that_forgets_the_session_before_p_hears_of_it_is_lost_for_the_request(
    world: World,
) -> None:
    call = world.call("t-1", decodes=(D1, D2))
    world.connect()
    world.refuse(Fault(Reason.NO_SESSION, "unknown session"))
    assert world.emitted(call) == ["queued", "placing"]
    alone = world.call("t-2")
    world.refuse(Fault(Reason.NO_SESSION, "unknown session"), "t-2")
    fault = world.fault(alone)
    assert fault.reason is Reason.DECODE_LOST and "no longer knows the session" in fault.message


def test_an_allocate_outlives_a_session_that_comes_back(world: World) -> None:
    world.bring_to(PrefillState.ALLOCATING)
    world.break_session()
    world.grant()
    assert world.state() is PrefillState.COMPUTING
    world.advance(0.1)
    world.connect()
    beat = world.taken(act.SendOnSession)[-1].message.heartbeat
    assert list(beat.grant_ids) == ["g-t-1-1"]


def test_an_allocate_is_given_up_when_its_d_does_not_come_back(world: World) -> None:
    call = world.bring_to(PrefillState.ALLOCATING)
    world.break_session()
    world.advance(1.1)
    assert world.fault(call).reason is Reason.DECODE_LOST
    assert len(world.taken(act.CancelAllocate)) == 1
    assert world.releases() == [(D1, Reason.DECODE_LOST)]


def test_of_a_d_that_cannot_be_had_it_is_told_when_it_is_asked_again(world: World) -> None:
    """Whoever has nobody else to turn to comes back then."""
    unheard = world.call("t-1", decodes=(D1, D2))
    world.advance(world.config.connect_s)
    assert world.emitted(unheard) == ["queued", "placing"]
    world.advance(world.config.connect_s)
    fault = world.fault(unheard)
    assert fault.reason is Reason.DECODE_LOST and "no welcome" in fault.message
    assert fault.retry_after_s == world.config.breaker_open_s
    world.call("t-2", decodes=(D2,))
    assert world.fault(world.call("t-3", decodes=(D2,))).retry_after_s == fault.retry_after_s


def test_requests_beyond_the_queue_are_refused_and_only_for_that_d() -> None:
    world = World(prefill_queue=2)
    for n in range(2):
        world.call(f"t-{n}")
    fault = world.fault(world.call("t-3"))
    assert fault.reason is Reason.QUEUE_FULL
    # It is about requests, and says nothing of blocks.
    assert fault.retry_after_s == 0.25 and fault.quota is None
    other = world.call("t-4", decodes=(D2,))
    assert world.emitted(other) == ["queued"]


def test_a_request_whose_first_queue_is_full_goes_where_there_is_room() -> None:
    world = World(prefill_queue=2)
    for n in range(2):
        world.call(f"t-{n}")
    call = world.call("t-3", decodes=(D1, D2))
    assert world.emitted(call) == ["queued", "placing"]
    assert world.machine.placement.pool.waiting_for(D2) == 1


def test_those_that_turn_elsewhere_keep_to_the_queue_there() -> None:
    world = World(prefill_queue=2)
    world.call("t-0")
    world.break_session(D1)
    calls = [world.call(f"t-{n}", decodes=(D1, D2)) for n in range(1, 5)]
    assert world.machine.placement.pool.waiting_for(D2) == 2
    assert [world.emitted(call)[-1] for call in calls] == ["placing"] * 2 + ["DECODE_LOST"] * 2
    both = World(prefill_queue=1)
    for n, endpoint in enumerate((D1, D2)):
        both.call(f"t-{n}", decodes=(endpoint,))
    refused = both.call("t-3", decodes=(D1, D2))
    assert both.emitted(refused) == ["QUEUE_FULL"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grant_id": ""}, "grant_id"),
        ({"wanted": [types_pb2.BlockRange(start=1, count=9)]}, "wanted blocks [1, 10) of 2"),
        ({"wanted": [types_pb2.BlockRange(start=0, count=0)]}, "wanted blocks [0, 0)"),
        ({"shards": []}, "no shards"),
        ({"shards": [layout_pb2.Shard(endpoint="x:1", tp_size=2)]}, "shards: 1, not 2"),
        ({"shards": [layout_pb2.Shard(endpoint="x:1", dp_size=2)]}, "shards[0].dp_size: 2"),
        ({"shards": [layout_pb2.Shard(endpoint="x:1", head_count=3)]}, "head_count: [0, 3)"),
        ({"shards": [layout_pb2.Shard(endpoint="x:1", layer_count=9)]}, "layer_count: [0, 9)"),
        ({"shards": [layout_pb2.Shard()]}, "shards[0].endpoint: must be host:port"),
        ({"shards": [layout_pb2.Shard(endpoint="x")]}, "shards[0].endpoint: must be host:port"),
        ({"shards": [layout_pb2.Shard(endpoint="x:0")]}, "shards[0].endpoint: must have a port"),
        ({"transport": layout_pb2.TRANSPORT_NIXL}, "transport"),
    ],
)
def test_a_grant_that_cannot_be_used_is_given_back(
    world: World, change: dict[str, object], says: str
) -> None:
    call = world.call()
    world.connect()
    good: dict[str, object] = {
        "grant_id": "g",
        "wanted": [types_pb2.BlockRange(start=0, count=2)],
        "shards": [layout_pb2.Shard(endpoint="x:1")],
    }
    response = decode_pb2.AllocateResponse(**{**good, **change})  # type: ignore[arg-type]
    world.feed(ev.AllocateAnswered(world.ask(), response, None))
    fault = world.fault(call)
    assert fault.reason is Reason.WRONG_STATE and says in fault.message
    assert world.releases() == [(D1, Reason.WRONG_STATE)]


def test_grants_wait_for_the_engine_within_prepare_ahead() -> None:
    world = World(prepare_ahead=2)
    world.occupy_pool()
    for n in range(5):
        world.call(f"t-{n}")
    world.connect()
    # All five ask, for those that ask do not count; with two granted no other may begin to.
    for n in range(2):
        world.grant(f"t-{n}")
    world.call("t-5")
    assert world.state("t-5") is PrefillState.QUEUED
    world.free_pool()
    world.feed(ev.PrefillCallEnded(1))
    assert world.state("t-5") is PrefillState.ALLOCATING
    assert world.machine.requests.in_flight[TransferKey("t-1", 1)].holding is not None
