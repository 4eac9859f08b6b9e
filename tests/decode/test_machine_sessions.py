"""Sessions: who is taken in, what keeps grants alive, and what a lost P takes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.sessions import Offer, Sessions
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.config import Timeouts
from pd_grpc.protocol.faults import Code, Fault, Reason, read_status
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import duration, layout_to_proto
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import D_EPOCH, LAYOUT, SHARD, Request
from tests.decode.prefill_peer import Prefill

P = types_pb2.ROLE_PREFILL


def refusal(d: Harness, **fields: Any) -> Fault:
    """Why a Hello with these fields is turned away."""
    p = Prefill(d, **fields)
    fault = d.session_ends[p.stream]
    assert fault is not None and p.stream not in d.told
    return fault


def test_a_welcome_says_who_we_are_and_what_we_offer(d: Harness, p: Prefill) -> None:
    welcome = d.told[p.stream][0].welcome
    assert welcome == decode_pb2.Welcome(
        instance=types_pb2.Instance(name="d", epoch=D_EPOCH, role=types_pb2.ROLE_DECODE),
        session_id=p.session_id,
        layout=layout_to_proto(LAYOUT),
        transport=layout_pb2.TRANSPORT_INLINE,
        shards=[SHARD],
        lease=duration(15),
        grace=duration(1),
        heartbeat=duration(5),
        max_model_len=64,
        kv_progress=duration(10),
        first_token=duration(30),
        attach=duration(10),
        tombstone=duration(60),
        kv_format="canonical",
    )


# Hello, field by field


@pytest.mark.parametrize(
    ("field", "ours", "theirs", "change"),
    [
        ("model", "m", "m2", {"model": "m2"}),
        ("positions", "p", "rope", {"positions": "rope"}),
        ("block_size", "4", "8", {"block_size": 8}),
        ("groups", "1", "0", {"groups": []}),
        ("groups[0].layers", "2", "3", {"groups": [layout_pb2.KvGroup(layers=3)]}),
        ("groups[0].planes", "2", "0", {"groups": [layout_pb2.KvGroup(layers=2)]}),
    ],
)
def test_a_layout_that_differs_names_the_field_and_both_values(
    d: Harness, field: str, ours: str, theirs: str, change: dict[str, object]
) -> None:
    """F57, F63: nothing is taken as it is, and defaults are filled in."""
    layout = layout_to_proto(LAYOUT)
    for name, value in change.items():
        layout.ClearField(name)
        if isinstance(value, list):
            getattr(layout, name).extend(value)
        else:
            setattr(layout, name, value)
    fault = refusal(d, layouts=[layout])
    assert fault.reason is Reason.LAYOUT_MISMATCH and fault.code is Code.FAILED_PRECONDITION
    assert fault.metadata == {"field": f"layout.{field}", "ours": ours, "theirs": theirs}
    assert fault.message == f"layout.{field} differs: {ours} on D, {theirs} on P"


@pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("heads", 2), ("head_dim", 16)])
def test_a_plane_that_differs_names_the_field(d: Harness, field: str, value: object) -> None:
    layout = layout_to_proto(LAYOUT)
    setattr(layout.groups[0].planes[1], field, value)
    fault = refusal(d, layouts=[layout])
    assert fault.metadata["field"] == f"layout.groups[0].planes[1].{field}"
    assert fault.metadata["theirs"] == str(value)


@pytest.mark.parametrize(
    "transports", [[], [0], [layout_pb2.TRANSPORT_SHM, 0], [99, layout_pb2.TRANSPORT_INLINE]]
)
def test_inline_may_be_offered_without_its_name(d: Harness, transports: list[int]) -> None:
    p = Prefill(d, transports=transports)
    assert d.told[p.stream][0].welcome.transport == layout_pb2.TRANSPORT_INLINE


def test_one_of_several_layouts_is_enough(d: Harness) -> None:
    other = layout_to_proto(LAYOUT)
    other.model = "other"
    p = Prefill(d, layouts=[other, layout_to_proto(LAYOUT)])
    assert d.told[p.stream][0].welcome.layout.model == "m"


OWN = replace(LAYOUT, format="own")


def test_of_two_layouts_that_fit_the_one_in_ds_format_is_chosen(d: Harness) -> None:
    p = Prefill(d, layouts=[layout_to_proto(OWN), layout_to_proto(LAYOUT)])
    welcome = d.told[p.stream][0].welcome
    assert (welcome.layout, welcome.kv_format) == (layout_to_proto(LAYOUT), "canonical")


def test_a_format_that_d_does_not_have_goes_canonically(d: Harness) -> None:
    other = layout_to_proto(replace(LAYOUT, model="other"))
    p = Prefill(d, layouts=[other, layout_to_proto(OWN)])
    welcome = d.told[p.stream][0].welcome
    assert (welcome.layout, welcome.kv_format) == (layout_to_proto(OWN), "canonical")


@pytest.mark.parametrize(
    ("ours", "theirs", "transport", "kv_format"),
    [
        (LAYOUT, LAYOUT, layout_pb2.TRANSPORT_SHM, "canonical"),
        (OWN, OWN, layout_pb2.TRANSPORT_SHM, "own"),
        (LAYOUT, OWN, layout_pb2.TRANSPORT_INLINE, "canonical"),
        (OWN, LAYOUT, layout_pb2.TRANSPORT_INLINE, "canonical"),
        (OWN, replace(OWN, format="another"), layout_pb2.TRANSPORT_INLINE, "canonical"),
    ],
)
def test_formats_that_differ_leave_inline_and_canonical_alone(
    ours: KvLayout, theirs: KvLayout, transport: int, kv_format: str
) -> None:
    sessions = _sessions(ours)
    hello = _hello(theirs, [layout_pb2.TRANSPORT_SHM, layout_pb2.TRANSPORT_INLINE])
    joined = sessions.join(1, hello, "s")
    assert (joined.welcome.transport, joined.welcome.kv_format) == (transport, kv_format)
    assert (joined.session.carrier.transport, joined.session.carrier.kv_format) == (
        transport,
        kv_format,
    )
    assert joined.welcome.layout == layout_to_proto(theirs)


def test_a_p_of_another_format_without_inline_is_refused() -> None:
    with pytest.raises(Fault) as raised:
        _sessions(LAYOUT).join(1, _hello(OWN, [layout_pb2.TRANSPORT_SHM]), "s")
    assert raised.value.reason is Reason.LAYOUT_MISMATCH
    assert raised.value.metadata == {
        "field": "transports",
        "ours": "TRANSPORT_INLINE",
        "theirs": "TRANSPORT_SHM",
    }


def _sessions(layout: KvLayout) -> Sessions:
    instance = types_pb2.Instance(name="d", epoch=1, role=types_pb2.ROLE_DECODE)
    carriers = (Carrier(layout_pb2.TRANSPORT_SHM, one_sided=True), INLINE_CARRIER)
    return Sessions(Offer(instance, layout, [SHARD], frozenset(), 100, Timeouts(), carriers))


def _hello(layout: KvLayout, transports: list[layout_pb2.Transport]) -> decode_pb2.Hello:
    instance = types_pb2.Instance(name="p", epoch=1, role=types_pb2.ROLE_PREFILL)
    return decode_pb2.Hello(
        instance=instance, layouts=[layout_to_proto(layout)], transports=transports
    )


def test_a_layout_with_defaults_left_out_is_the_same(d: Harness) -> None:
    layout = layout_to_proto(LAYOUT)
    layout.ClearField("format")
    layout.groups[0].ClearField("kind")
    p = Prefill(d, layouts=[layout])
    assert p.session_id


@pytest.mark.parametrize("kind", [layout_pb2.KV_GROUP_KIND_LATENT, 99])
def test_a_kind_of_attention_that_is_not_built_is_refused(d: Harness, kind: int) -> None:
    layout = layout_to_proto(LAYOUT)
    layout.groups[0].kind = kind  # type: ignore[assignment]
    fault = refusal(d, layouts=[layout])
    assert fault.reason is Reason.FEATURE
    assert fault.metadata == {"feature": "layout.groups[0].kind"}


@pytest.mark.parametrize("kind", [0, layout_pb2.PLANE_KIND_STATE, 99])
def test_a_kind_of_plane_that_is_not_built_is_named(d: Harness, kind: int) -> None:
    layout = layout_to_proto(LAYOUT)
    layout.groups[0].planes[1].kind = kind  # type: ignore[assignment]
    fault = refusal(d, layouts=[layout])
    assert fault.reason is Reason.FEATURE
    assert fault.metadata == {"feature": "layout.groups[0].planes[1].kind"}


@pytest.mark.parametrize("kind", [layout_pb2.KV_GROUP_KIND_LATENT, 99])
def test_an_exotic_layout_does_not_hide_a_plain_one_behind_it(d: Harness, kind: int) -> None:
    exotic = layout_to_proto(LAYOUT)
    exotic.groups[0].kind = kind  # type: ignore[assignment]
    p = Prefill(d, layouts=[exotic, layout_to_proto(LAYOUT)])
    assert d.told[p.stream][0].welcome.layout == layout_to_proto(LAYOUT)


@pytest.mark.parametrize("kind", [2, 3, 4, 5, 6])
def test_of_the_other_kinds_of_groups_sliding_alone_is_built(d: Harness, kind: int) -> None:
    layout = layout_to_proto(LAYOUT)
    layout.groups[0].kind = kind  # type: ignore[assignment]
    built = kind == layout_pb2.KV_GROUP_KIND_SLIDING
    expected = Reason.LAYOUT_MISMATCH if built else Reason.FEATURE
    assert refusal(d, layouts=[layout]).reason is expected


def test_a_scale_plane_that_d_does_not_have_differs(d: Harness) -> None:
    """F58."""
    layout = layout_to_proto(LAYOUT)
    layout.groups[0].planes.add(kind=layout_pb2.PLANE_KIND_SCALE, dtype="float32", heads=1)
    fault = refusal(d, layouts=[layout])
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata == {"field": "layout.groups[0].planes", "ours": "2", "theirs": "3"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"transports": [layout_pb2.TRANSPORT_SHM, 99]}, "transports"),
        ({"shards": [SHARD, SHARD]}, "shards"),
        ({"shards": [layout_pb2.Shard(tp_size=2)]}, "shards"),
        ({"shards": [layout_pb2.Shard(pp_size=2)]}, "shards"),
        ({"shards": [layout_pb2.Shard(dp_size=2)]}, "shards[0].dp_size"),
        ({"shards": [layout_pb2.Shard(dp_size=1, dp_rank=1)]}, "shards[0].dp_rank"),
        ({"shards": [layout_pb2.Shard(layer_start=1)]}, "shards[0].layer_start"),
        ({"shards": [layout_pb2.Shard(layer_count=1)]}, "shards[0].layer_count"),
        ({"shards": [layout_pb2.Shard(head_start=1)]}, "shards[0].head_start"),
        ({"shards": [layout_pb2.Shard(head_count=3)]}, "shards[0].head_count"),
        ({"hash_algorithm": "md5"}, "hash_algorithm"),
    ],
)
def test_means_that_differ_name_the_field(
    d: Harness, fields: dict[str, object], field: str
) -> None:
    fault = refusal(d, **fields)
    assert fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata["field"] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"layouts": []}, "hello.layouts"),
        ({"instance": types_pb2.Instance(epoch=1, role=P)}, "hello.instance.name"),
        ({"instance": types_pb2.Instance(name="p", role=P)}, "hello.instance.epoch"),
        ({"instance": types_pb2.Instance(name="p" * 129, epoch=1, role=P)}, "hello.instance.name"),
        ({"instance": types_pb2.Instance(name="p", epoch=1)}, "hello.instance.role"),
        (
            {"instance": types_pb2.Instance(name="p", epoch=1, role=types_pb2.ROLE_DECODE)},
            "hello.instance.role",
        ),
    ],
)
def test_a_malformed_hello_names_the_field(
    d: Harness, fields: dict[str, object], field: str
) -> None:
    fault = refusal(d, **fields)
    assert fault.reason is Reason.BAD_REQUEST
    assert [wrong.field for wrong in fault.fields] == [field]


def test_a_hello_meant_for_another_is_refused(d: Harness) -> None:
    fault = refusal(d, decode_name="d-other")
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": "d-other", "here": "d"}


# Epochs and sessions


def test_a_greater_epoch_takes_the_place_of_a_smaller(d: Harness, p: Prefill) -> None:
    """F10, F21: the requests of the process that is gone fail, and only those."""
    request, other = Request(), Request("t-other")
    client = d.generate(request)
    p.granted(request)
    neighbour = Prefill(d, "p-other")
    neighbour.granted(other)
    newer = Prefill(d, epoch=11)
    fault = d.session_ends[p.stream]
    assert fault is not None and fault.reason is Reason.SUPERSEDED
    assert d.reason(client) is Reason.PREFILL_LOST
    assert d.refused[client].code is Code.UNAVAILABLE
    assert d.reason(p.allocate(request)) is Reason.NO_SESSION
    assert d.state("t-other") is S.RESERVED
    newer.hand_off(Request(attempt=2))
    assert d.state(attempt=2) is S.READY
    neighbour.release(other)
    d.advance_alive(newer, d.config.attach_s)


def test_a_smaller_epoch_is_refused(d: Harness, p: Prefill) -> None:
    older = Prefill(d, epoch=9)
    fault = d.session_ends[older.stream]
    assert fault is not None and fault.reason is Reason.STALE_EPOCH
    assert fault.metadata == {"epoch": "9", "newest": "10"}
    assert p.stream not in d.session_ends


def test_a_smaller_epoch_is_refused_after_the_greater_has_left(d: Harness, p: Prefill) -> None:
    p.says_goodbye()
    older = Prefill(d, epoch=9)
    fault = d.session_ends[older.stream]
    assert fault is not None and fault.reason is Reason.STALE_EPOCH


def test_the_newest_session_of_an_epoch_owns_its_grants(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    old_stream, old_session = p.stream, p.session_id
    p.join()
    fault = d.session_ends[old_stream]
    assert fault is not None and fault.reason is Reason.SUPERSEDED
    d.feed(ev.SessionStreamEnded(old_stream))
    d.advance(d.config.grace_s * 2)
    assert d.state() is S.RESERVED, "the end of an older session is nothing"
    new_session, p.session_id = p.session_id, old_session
    assert d.reason(p.first_token(request, grant)) is Reason.NO_SESSION
    p.session_id = new_session
    assert p.heartbeat(grant) == []
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer


def test_a_session_that_comes_back_within_grace_goes_on(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    p.breaks()
    d.advance(d.config.grace_s * 0.9)
    p.join()
    d.advance(d.config.grace_s * 5)
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer


def test_a_session_that_does_not_come_back_loses_its_grants(d: Harness, p: Prefill) -> None:
    """S8."""
    requests = [Request("t-1"), Request("t-2", prompt=list(range(200, 240)))]
    clients = [d.generate(r) for r in requests]
    p.granted(requests[0])
    p.granted(requests[1])
    waiting = p.allocate(Request("t-3", prompt=list(range(300, 340))))
    p.breaks()
    d.advance(d.config.grace_s - 0.01)
    assert d.state("t-1") is S.RESERVED
    d.advance(0.01)
    assert {d.reason(c) for c in clients} == {Reason.PREFILL_LOST}
    assert d.reason(waiting) is Reason.PREFILL_LOST


def test_goodbye_takes_everything_at_once(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request)
    p.says_goodbye()
    assert d.reason(client) is Reason.PREFILL_LOST
    assert d.session_ends[p.stream] is None
    assert d.reason(p.allocate(Request("t-2"))) is Reason.NO_SESSION


@pytest.mark.parametrize("end", ["breaks", "goodbye", "silent", "replaced"])
def test_what_was_handed_off_is_untouched(d: Harness, p: Prefill, end: str) -> None:
    decoding, ready = Request("t-1", max_tokens=9), Request("t-2", max_tokens=9)
    client = d.generate(decoding)
    p.hand_off(decoding)
    p.hand_off(ready)
    d.run_step()
    if end == "breaks":
        p.breaks()
    elif end == "goodbye":
        p.says_goodbye()
    elif end == "replaced":
        Prefill(d, epoch=11)
    # Without a heartbeat from here on, but within the time a client may take to come.
    d.advance(d.config.attach_s * 0.9)
    late = d.generate(ready)
    d.advance(d.config.lease_s * 2)
    d.run()
    assert d.shown[client] == decoding.answer
    assert d.shown[late] == ready.answer


# Heartbeats and leases


def test_a_heartbeat_renews_what_it_lists_and_nothing_else(d: Harness, p: Prefill) -> None:
    kept, dropped = Request("t-kept"), Request("t-dropped")
    grant = p.granted(kept)
    p.granted(dropped)
    client = d.generate(dropped)
    for _ in range(3):
        d.advance(d.config.heartbeat_s)
        p.heartbeat(grant)
    assert d.state("t-kept") is S.RESERVED
    assert d.reason(client) is Reason.LEASE_EXPIRED
    assert d.path("t-dropped")[-1] is S.EXPIRED
    (ended,) = d.ended_for(p.stream)
    assert ended.ref == dropped.ref and ended.state == types_pb2.TRANSFER_STATE_EXPIRED
    p.release(kept)


def test_the_ack_names_grants_that_are_unknown(d: Harness, p: Prefill) -> None:
    grant = p.granted(Request())
    assert p.heartbeat(grant, "g-none") == ["g-none"]
    p.release(Request())
    assert p.heartbeat(grant) == [grant]


def test_an_end_that_p_has_missed_is_told_when_it_comes_back(d: Harness, p: Prefill) -> None:
    client = d.generate(request := Request())
    grant = p.granted(request)
    p.breaks()
    d.leave(client)
    p.join()
    assert p.heartbeat(grant) == [grant]
    (ended,) = d.ended_for(p.stream)
    assert (ended.ref, ended.state) == (request.ref, S.RELEASED.wire)
    fault = read_status(ended.status)
    assert isinstance(fault, Fault) and fault.reason is Reason.CLIENT_GONE
    kinds = [message.WhichOneof("message") for message in d.told[p.stream]]
    assert kinds.index("transfer_ended") < kinds.index("heartbeat_ack")


def test_the_end_of_anothers_transfer_is_nobodys_business(d: Harness, p: Prefill) -> None:
    client = d.generate(request := Request())
    grant = p.granted(request)
    d.leave(client)
    other = Prefill(d, "p2")
    assert other.heartbeat(grant, "g-none") == [grant, "g-none"]
    assert d.ended_for(other.stream) == []


def test_an_end_that_is_forgotten_is_not_told_again(d: Harness, p: Prefill) -> None:
    client = d.generate(request := Request())
    grant = p.granted(request)
    d.leave(client)
    d.advance_alive(p, 61)
    told = len(d.ended_for(p.stream))
    assert p.heartbeat(grant) == [grant]
    assert len(d.ended_for(p.stream)) == told == 1


def test_a_grant_that_was_handed_off_is_known(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.hand_off(request)
    assert p.heartbeat(grant) == []
    d.run()
    assert d.shown[client] == request.answer


def test_chunks_renew_a_grant(d: Harness, p: Prefill) -> None:
    """F6: who is only busy is not dead."""
    request = Request()
    grant = p.granted(request)
    d.feed(ev.ReceiveStarted(grant))
    for _ in range(8):
        d.advance(4.0)
        p.heartbeat()
        d.feed(ev.ReceiveProgress(grant, 1))
    assert d.state() is S.RECEIVING
    p.release(request)


def test_waiting_for_blocks_takes_no_lease(d: Harness, p: Prefill) -> None:
    """F6."""
    holder, waiting = Request("t-1", prompt=list(range(100, 148))), Request("t-2")
    waiting.prompt = holder.prompt
    grant = p.granted(holder)
    call = p.allocate(waiting, max_wait_s=90.0, budget_s=95.0)
    for _ in range(8):
        d.advance(5.0)
        p.heartbeat(grant)
    assert d.state("t-2") is S.WAITING
    p.release(holder)
    assert call in d.answers
    p.release(waiting)


def test_a_heartbeat_is_told_the_load_when_it_has_changed(d: Harness, p: Prefill) -> None:
    holder = Request("t-1", prompt=list(range(100, 148)))
    p.granted(holder)
    p.allocate(Request("t-2", prompt=holder.prompt))
    p.heartbeat()
    load = d.told[p.stream][-1].load
    assert load == decode_pb2.Load(
        free_blocks=3, total_blocks=16, queued_tokens=48, queued_requests=1
    )
    p.heartbeat()
    assert d.told[p.stream][-1].HasField("heartbeat_ack"), "nothing has changed"
    p.release(holder)
    p.heartbeat()
    assert d.told[p.stream][-1].load.queued_requests == 0
    p.release(Request("t-2"))


def test_a_silent_session_is_as_good_as_broken(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    p.granted(request)
    d.advance(2 * d.config.heartbeat_s)
    fault = d.session_ends[p.stream]
    assert fault is not None and fault.reason is Reason.LEASE_EXPIRED
    d.feed(ev.SessionStreamEnded(p.stream))
    assert client not in d.refused
    d.advance(d.config.grace_s)
    assert d.reason(client) is Reason.PREFILL_LOST


def test_late_words_of_an_old_stream_are_counted(d: Harness, p: Prefill) -> None:
    old = p.stream
    p.join()
    d.feed(ev.HeartbeatReceived(old, decode_pb2.Heartbeat(sequence=1)))
    d.feed(ev.GoodbyeReceived(old))
    assert d.late == 2
    assert p.stream not in d.session_ends


def test_a_prefill_that_comes_back_while_we_drain_is_told_so(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    p.breaks()
    d.feed(ev.DrainRequested(30.0))
    d.advance(0.5)
    p.join()
    welcome, drain = d.told[p.stream]
    assert welcome.HasField("welcome")
    assert drain.drain == decode_pb2.Drain(deadline=duration(29.5))
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer
