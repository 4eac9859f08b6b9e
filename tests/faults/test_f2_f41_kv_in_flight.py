"""F2, F41: no write that was on its way when a request ended reaches the next one, and no step
reads KV before all of it has come. P is made of raw messages, so that the moment can be chosen."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio

from pd_grpc.v1 import transfer_pb2
from tests.decode.wire import CALL_S, GatedEngine, tokens_of, wire
from tests.waiting import until

BLOCKS = 8


async def test_what_an_aborted_sender_still_writes_does_not_reach_the_next_request() -> None:
    """F2: with `inline` D does the writing, so that nothing needs to be quarantined for P."""
    async with wire(num_blocks=BLOCKS) as d:
        p = await d.prefill()
        pool, machine = d.server.pool, d.server.machine
        aborted = d.request(prompt=list(range(100, 126)))
        following = d.request(prompt=list(range(300, 326)))
        client = d.generate(aborted)
        grant = await p.allocate(aborted)
        taken = set(machine.ledger.transfers[grant.grant_id].holding.blocks)  # type: ignore[union-attr]
        _, chunks = p.compute(aborted)
        call = await p.open(aborted, grant)
        assert (await call.read()).HasField("opened")
        for chunk in chunks[: len(chunks) // 2]:
            await call.write(transfer_pb2.TransferRequest(chunk=chunk))
        client.cancel()

        async def write_on() -> None:
            """As one does that has not heard of the end."""
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for chunk in chunks * 20:
                    await call.write(transfer_pb2.TransferRequest(chunk=chunk))

        writing = asyncio.create_task(write_on())
        answer = asyncio.create_task(tokens_of(d.generate(following)))
        again = await p.allocate(following)
        reused = set(machine.ledger.transfers[again.grant_id].holding.blocks)  # type: ignore[union-attr]
        assert reused & taken, "the pool is too small for other blocks"
        token, kv = p.compute(following)
        await p.first_token(following, again.grant_id, token)
        await p.send_kv(following, again, kv)
        assert await answer == d.answer(following)
        await writing
        assert pool.total == BLOCKS


async def test_blocks_that_a_step_writes_to_are_nobodys_until_it_ends() -> None:
    """F2: the client leaves in mid-step; the next request waits for the step."""
    async with wire(GatedEngine, num_blocks=BLOCKS) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        engine.gate.clear()
        leaving = d.request(prompt=list(range(100, 126)))
        call = d.generate(leaving, local=True)
        await asyncio.to_thread(engine.entered.wait, CALL_S)
        call.cancel()
        await until(lambda: not d.server.machine.ledger.transfers)
        assert d.server.pool.free < BLOCKS, "the step still has them"
        following = d.request(prompt=list(range(300, 326)))
        answer = asyncio.create_task(tokens_of(d.generate(following, local=True)))
        await until(lambda: bool(d.server.machine.ledger.transfers))
        engine.gate.set()
        assert await answer == d.answer(following)


async def test_no_step_is_made_before_the_last_byte_of_kv_is_verified() -> None:
    """F41"""
    async with wire(GatedEngine) as d:
        engine = d.server.engine
        assert isinstance(engine, GatedEngine)
        p = await d.prefill()
        request = d.request(max_tokens=6)
        shown: list[int] = []

        async def read() -> None:
            async for message in d.generate(request):
                shown.extend(message.token_ids)

        reading = asyncio.create_task(read())
        grant = await p.allocate(request)
        token, chunks = p.compute(request)
        call = await p.open(request, grant)
        assert (await call.read()).HasField("opened")
        await p.first_token(request, grant.grant_id, token)
        for chunk in chunks[:-1]:
            await call.write(transfer_pb2.TransferRequest(chunk=chunk))
            assert (await call.read()).HasField("ack")
        assert await d.state(request) == "RECEIVING"
        assert not engine.entered.is_set(), "all but one chunk is not all"
        other = d.request(prompt=list(range(300, 310)))
        assert await tokens_of(d.generate(other, local=True)) == d.answer(other)
        assert shown == [token], "the first token is P's own, and risks nothing"
        await call.write(transfer_pb2.TransferRequest(chunk=chunks[-1]))
        end = transfer_pb2.TransferEnd(
            chunks=len(chunks), bytes=sum(len(chunk.payload) for chunk in chunks)
        )
        await call.write(transfer_pb2.TransferRequest(end=end))
        await reading
        assert shown == d.answer(request)
