"""D10x: how P and D meet, and what they agree on."""

from __future__ import annotations

import grpc.aio

from pd_grpc.conformance.calls import Stream, check_metadata
from pd_grpc.conformance.case import answer_s, expect, expect_equal, within
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.protocol.faults import Code, Reason, TransportFault
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import decode_pb2, transfer_pb2_grpc, types_pb2

UNHEARD_OF = "kit-has-this-alone"


@case(101, "P sends hello first and D answers welcome.")
async def welcome_answers_hello(d: DecodeHand) -> None:
    """Hello with D's own layout is answered by a complete welcome."""
    p = await d.prefill()
    welcome = p.welcome
    expect(bool(welcome.session_id), "a session_id", welcome)
    expect(bool(welcome.shards), "at least one shard", welcome)
    expect_equal(welcome.layout, d.subject.info.layout, "layout, of GetModelInfo,")


@case(102, "FAILED_PRECONDITION with WRONG_STATE for a message out of order")
async def heartbeat_before_hello(d: DecodeHand) -> None:
    """A heartbeat as the first message is refused."""
    stream = d.new_prefill().open_session()
    await stream.offer(decode_pb2.SessionRequest(heartbeat=decode_pb2.Heartbeat(sequence=1)))
    await stream.refused(Reason.WRONG_STATE, "a heartbeat before hello")


@case(103, "First message, exactly once.")
async def hello_twice(d: DecodeHand) -> None:
    """A second hello on a session is refused."""
    p = await d.prefill(beats=False)
    await p.session.offer(decode_pb2.SessionRequest(hello=p.hello()))
    await p.session.refused(Reason.WRONG_STATE, "hello on a session that has begun")


@case(104, "Minted by D, never empty; every call of P's carries it.")
async def session_ids_differ(d: DecodeHand) -> None:
    """Sessions of two Ps, and a second session of one of them, have ids of their own."""
    p, other = await d.prefill(), await d.prefill()
    ids = [p.welcome.session_id, other.welcome.session_id]
    ids.append((await p.join()).session_id)
    expect(all(ids) and len({*ids}) == len(ids), "three session ids, all different", ids)


@case(105, "Life of a grant after it was last renewed; above 0.")
async def welcome_says_who_and_how_long(d: DecodeHand) -> None:
    """Welcome names D as an instance and announces the lease."""
    welcome = (await d.prefill()).welcome
    who = welcome.instance
    expect_equal(who.role, types_pb2.ROLE_DECODE, "instance.role")
    expect(1 <= len(who.name) <= 128, "an instance.name of 1 to 128 characters", welcome)
    expect(who.epoch > 0, "an instance.epoch above 0", welcome)
    expect(seconds(welcome.lease) > 0, "a lease above 0", welcome)
    if welcome.HasField("heartbeat"):
        expect(seconds(welcome.heartbeat) > 0, "a heartbeat above 0, or none", welcome)


@case(106, "D's shards, at least one; each serves TransferService at its own endpoint.")
async def every_shard_serves_transfers(d: DecodeHand) -> None:
    """Each endpoint in welcome takes a connection and knows the method Transfer."""
    for shard in (await d.prefill()).welcome.shards:
        async with grpc.aio.insecure_channel(shard.endpoint) as channel:
            await within(None, channel.channel_ready(), f"a connection to {shard.endpoint}")
            stub = transfer_pb2_grpc.TransferServiceStub(d.transcript.channel(channel))
            stream = Stream(stub.Transfer(timeout=answer_s()), "Transfer", d.transcript)
            await stream.half_close()
            fault = await stream.outcome()
            missing = isinstance(fault, TransportFault) and fault.code is Code.UNIMPLEMENTED
            expect(not missing, f"TransferService at {shard.endpoint}", fault)


@case(107, "Names that D does not know are left out of Welcome.")
async def features_of_both_alone(d: DecodeHand) -> None:
    """Welcome lists the features that P named and D has: not P's own, and none unasked."""
    p = await d.prefill()
    expect_equal(list(p.welcome.features), [], "features, of a P that named none,")
    has = [*d.subject.info.features]
    welcome = await p.join(features=[UNHEARD_OF, *has])
    expect_equal(sorted(welcome.features), sorted(has), "features")


@case(108, "Name of the D that P means; another D refuses with WRONG_INSTANCE.")
async def another_instance_meant(d: DecodeHand) -> None:
    """Hello that means a D of another name is refused with both names."""
    p = d.new_prefill()
    fault = await p.refused(Reason.WRONG_INSTANCE, "another D meant", decode_name=UNHEARD_OF)
    check_metadata(fault, meant=UNHEARD_OF, here=d.subject.instance.name)


@case(109, "Name of the D that P means; another D refuses with WRONG_INSTANCE. Empty means any.")
async def this_instance_meant(d: DecodeHand) -> None:
    """Hello that names this D is welcome."""
    p = d.new_prefill()
    welcome = await p.join(decode_name=d.subject.instance.name)
    expect_equal(welcome.instance, d.subject.instance, "instance, the same as for everybody,")
