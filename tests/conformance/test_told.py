"""What D has told is found, whichever session it came on and however much came before it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pd_grpc.conformance.case import Broken
from pd_grpc.conformance.decode.told import Told
from pd_grpc.v1 import decode_pb2, types_pb2


def said(**kind: Any) -> decode_pb2.SessionResponse:
    return decode_pb2.SessionResponse(**kind)


def ack(sequence: int) -> decode_pb2.HeartbeatAck:
    return decode_pb2.HeartbeatAck(sequence=sequence)


def load(blocks: int) -> decode_pb2.Load:
    return decode_pb2.Load(free_blocks=blocks)


def test_the_load_with_an_ack_is_what_was_told_last_before_the_next() -> None:
    told = Told()
    for message in (said(heartbeat_ack=ack(1)), said(load=load(5)), said(heartbeat_ack=ack(2))):
        told.add(message)
    assert [told.load_with(ack(n)).free_blocks for n in (1, 2)] == [5, 5]
    told.add(said(load=load(4)))
    assert [told.load_with(ack(n)).free_blocks for n in (1, 2)] == [5, 4]
    assert told.load == load(4)


def test_another_session_begins_with_no_load_and_no_acks() -> None:
    told = Told()
    told.add(said(heartbeat_ack=ack(1)))
    told.add(said(load=load(5)))
    told.begin()
    assert (told.load, told.ack(1), told.load_with(ack(1))) == (None, None, decode_pb2.Load())


def test_what_is_told_once_is_kept_over_sessions() -> None:
    told = Told()
    ended = decode_pb2.TransferEnded(ref=types_pb2.TransferRef(transfer_id="t", attempt=2))
    told.add(said(transfer_ended=ended))
    told.add(said(drain=decode_pb2.Drain()))
    told.begin()
    assert told.end_of(ended.ref) == ended
    assert told.end_of(types_pb2.TransferRef(transfer_id="t", attempt=1)) is None
    assert told.first("drain") == decode_pb2.Drain()
    assert told.first("goodbye") is None


async def test_who_waits_hears_of_it_as_it_comes_or_not_in_time() -> None:
    told = Told()
    waiting = asyncio.create_task(told.once(lambda: told.ack(2), "an ack", 5.0))
    await asyncio.sleep(0)
    told.add(said(heartbeat_ack=ack(1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    told.add(said(heartbeat_ack=ack(2)))
    assert await waiting == ack(2)
    with pytest.raises(Broken, match=r"expected an ack within 0\.01 s"):
        await told.once(lambda: told.ack(3), "an ack", 0.01)
