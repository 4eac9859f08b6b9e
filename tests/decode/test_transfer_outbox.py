"""When a shard's words to a sender leave."""

from __future__ import annotations

import asyncio

import pytest

from pd_grpc.decode import transfer_outbox
from pd_grpc.decode.transfer_outbox import TransferOutbox
from pd_grpc.v1 import transfer_pb2
from tests.waiting import LIMIT_S


def ack(accepted_bytes: int) -> transfer_pb2.TransferResponse:
    return transfer_pb2.TransferResponse(
        ack=transfer_pb2.TransferAck(accepted_bytes=accepted_bytes)
    )


async def test_an_ack_of_little_waits_for_more_and_then_leaves_all_the_same() -> None:
    outbox = TransferOutbox(ack_bytes=100)
    outbox.send(ack(60))
    asking = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.send(ack(90))
    assert await asyncio.wait_for(asking, LIMIT_S) == ack(90)
    outbox.send(ack(189))
    assert await asyncio.wait_for(outbox.next(), LIMIT_S) == ack(189)


@pytest.mark.parametrize("what", ["enough", "more words", "the end"])
async def test_an_ack_waits_for_nothing_once_there_is_more_to_say(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_outbox, "ACK_WAIT_S", 3600.0)
    outbox = TransferOutbox(ack_bytes=100)
    outbox.send(ack(60))
    asking = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not asking.done()
    if what == "enough":
        outbox.send(ack(100))
    elif what == "more words":
        completed = transfer_pb2.TransferCompleted(chunks=1, bytes=60)
        outbox.send(transfer_pb2.TransferResponse(completed=completed))
    else:
        outbox.end(None)
    message = await asyncio.wait_for(asking, LIMIT_S)
    assert message is not None
    assert message.ack.accepted_bytes == (100 if what == "enough" else 60)
