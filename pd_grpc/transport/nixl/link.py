"""P's right to write into the pool of one shard: its own agent, D's, and the connection between."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pd_grpc.protocol.layout import KvLayout
from pd_grpc.transport.base import SendSide, Unreachable
from pd_grpc.transport.nixl.agent import Agent, AgentError, Piece, Region
from pd_grpc.transport.nixl.wire import (
    BEAT_S,
    HANDSHAKE_S,
    LARGEST_MESSAGE,
    SILENT_S,
    Connection,
    Ended,
    Unclear,
)
from pd_grpc.v1 import nixl_pb2

CONFIRM_S = 5.0
"""How long a D is waited for that is to end a link; one that runs takes some milliseconds."""
_POLL_S, _SLOWEST_POLL_S = 0.0005, 0.004
"""How often a write is looked at, at first and in the end."""


class _Write(NamedTuple):
    number: int
    landed: asyncio.Future[bool]


async def attach(host: str, shard: nixl_pb2.NixlShard, side: SendSide) -> Link:
    """A link to a shard. Unreachable when there is none to be had."""
    try:
        return await _attach(host, shard, side)
    except asyncio.TimeoutError:
        why = f"D did not answer within {HANDSHAKE_S:g} s"
    except (OSError, Ended, Unclear, AgentError) as error:
        why = str(error)
    raise Unreachable(f"no writing through NIXL: {why}")


async def _attach(host: str, shard: nixl_pb2.NixlShard, side: SendSide) -> Link:
    opening = asyncio.open_connection(host, shard.port, limit=LARGEST_MESSAGE)
    connection = Connection(*await asyncio.wait_for(opening, HANDSHAKE_S))
    agent: Agent | None = None
    try:
        await connection.send(nixl_pb2.NixlAttach(secret=shard.secret, instance=side.instance))
        agent = await asyncio.to_thread(Agent, own_pool(side), connection.loopback)
        pool = await connection.receive(nixl_pb2.NixlPool, HANDSHAKE_S)
        if (pool.pool_id, pool.pool_bytes) != (shard.pool_id, shard.pool_bytes) or pool.device:
            raise Unclear("another pool came than the one meant")
        if not pool.pool_bytes or pool.pool_bytes % side.layout.block_bytes:
            size = side.layout.block_bytes
            raise Unclear(f"{pool.pool_bytes} bytes are not blocks of {size} bytes")
        await asyncio.to_thread(agent.meet, pool.agent)
        await connection.send(nixl_pb2.NixlState(pool_id=pool.pool_id, attached=True))
        await connection.receive(nixl_pb2.NixlState, HANDSHAKE_S)
    except BaseException:
        # Nothing was written yet, so that D ends it alone.
        if agent is not None:
            agent.destroy()
        await connection.close()
        raise
    return Link(connection, agent, pool, side)


def own_pool(side: SendSide) -> Region:
    """P's pool, which must be in host memory."""
    address = side.memory.host_address
    assert address is not None, "looked at when the transport was made"
    return Region(address, side.memory.num_blocks * side.layout.block_bytes)


class Link:
    """Lives until it is forgotten and no stream holds it, or until a write fails, D is silent or
    the connection ends. Then it is dead, and ends: what was not seen to land can land no more once
    D has destroyed its agent, which P hears of, or not within a bounded time (`stopped`)."""

    def __init__(
        self, connection: Connection, agent: Agent, pool: nixl_pb2.NixlPool, side: SendSide
    ) -> None:
        self.pool_id = pool.pool_id
        self.num_blocks = pool.pool_bytes // side.layout.block_bytes
        self._connection = connection
        self._agent = agent
        self._layout: KvLayout = side.layout
        self._source = own_pool(side).address
        self._target = pool.base_address
        self._flying: deque[_Write] = deque()
        self._more = asyncio.Event()
        self._streams = 0
        self._wanted = True
        self._ending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.stopped = True
        """Once it has ended: whether it is known that nothing of it can land any more."""
        self._now = asyncio.get_running_loop().time
        self._heard_at = self._now()
        self._listening = asyncio.create_task(self._listen(), name="pd-nixl-listen")
        self._tasks = [
            asyncio.create_task(self._watch(), name="pd-nixl-watch"),
            asyncio.create_task(self._beat(), name="pd-nixl-beat"),
        ]

    @property
    def alive(self) -> bool:
        """Whether one can write through it."""
        return self._ending is None

    def write(
        self, blocks: Sequence[int], to: Sequence[int], group: int, layer: int, layers: int
    ) -> asyncio.Future[bool]:
        """Copy layers `[layer, layer + layers)` of `group` from P's blocks to D's. The future is
        true once all of it is there; false when the link has ended first, and then P's memory is
        not read for it any more, and `stopped` says whether more of it can land. ValueError,
        writing nothing, when a block is outside D's pool."""
        for block in to:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is outside the pool of {self.num_blocks}")
        landed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._ending is not None:
            landed.set_result(False)
            return landed
        pieces = self._pieces(blocks, to, group, layer, layers)
        try:
            self._flying.append(_Write(self._agent.write(pieces), landed))
            self._more.set()
        except AgentError:
            # What of it has gone out nobody knows.
            self._flying.append(_Write(-1, landed))
            self._die()
        return landed

    async def quiet(self) -> bool:
        """Wait until every write that has begun is over; whether all have landed."""
        flying = [write.landed for write in self._flying]
        if flying:
            await asyncio.wait(flying)
        return all(landed.result() for landed in flying)

    def hold(self) -> None:
        """A stream uses it."""
        self._streams += 1

    def release(self) -> None:
        """A stream uses it no more; nothing of it is under way."""
        self._streams -= 1
        self._settle()

    def forget(self) -> None:
        """No further stream will use it."""
        self._wanted = False
        self._settle()

    async def end(self) -> None:
        """End it, whoever uses it, and wait until it has."""
        self._die()
        await self.ended()

    async def ended(self) -> None:
        """Wait until it has ended."""
        await self._over.wait()

    def _settle(self) -> None:
        if not self._wanted and not self._streams:
            self._die()

    def _pieces(
        self, blocks: Sequence[int], to: Sequence[int], group: int, layer: int, layers: int
    ) -> list[Piece]:
        """Where the bytes lie and go; what lies together at both ends is one piece."""
        offset = self._layout.layer_offset(group, layer)
        size = layers * self._layout.layer_bytes(group)
        pieces: list[Piece] = []
        for block, there in zip(blocks, to, strict=True):
            source = self._source + block * self._layout.block_bytes + offset
            target = self._target + there * self._layout.block_bytes + offset
            if pieces:
                last = pieces[-1]
                if (last.source + last.size, last.target + last.size) == (source, target):
                    pieces[-1] = Piece(last.source, last.target, last.size + size)
                    continue
            pieces.append(Piece(source, target, size))
        return pieces

    async def _watch(self) -> None:
        """Look whether what is under way has landed."""
        pause = _POLL_S
        while self.alive:
            if not self._flying:
                self._more.clear()
                await self._more.wait()
            first = self._flying[0]
            try:
                landed = self._agent.landed(first.number)
            except AgentError:
                self._die()
                return
            if landed:
                self._flying.popleft()
                first.landed.set_result(True)
                pause = _POLL_S
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL_S)

    async def _listen(self) -> bool:
        """Hear D while there is something to hear. Whether it has said that it has destroyed its
        agent: the end of the connection may be anybody's doing."""
        try:
            while (await self._connection.receive(nixl_pb2.NixlState)).attached:
                self._heard_at = self._now()
            return True
        except (Ended, Unclear):
            return False
        finally:
            self._die()

    async def _beat(self) -> None:
        with contextlib.suppress(Ended, Unclear):
            while self._now() < self._heard_at + SILENT_S:
                await asyncio.sleep(BEAT_S)
                await self._connection.send(self._state(True))
        self._die()

    def _state(self, attached: bool) -> nixl_pb2.NixlState:
        return nixl_pb2.NixlState(pool_id=self.pool_id, attached=attached)

    def _die(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="pd-nixl-end")

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        # From here on P's memory is not read.
        await asyncio.to_thread(self._agent.destroy)
        with contextlib.suppress(Ended, Unclear):
            await self._connection.send(self._state(False))
        if self._flying:
            await asyncio.wait([self._listening], timeout=CONFIRM_S)
            self.stopped = self._listening.done() and self._listening.result()
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await self._connection.close()
        for write in self._flying:
            write.landed.set_result(False)
        self._flying.clear()
        self._over.set()
