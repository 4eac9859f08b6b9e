"""P's end of the ZeroMQ rows. All but Allocate goes over gRPC as ever."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from google.rpc import status_pb2

from pd_grpc.bench.zmq_wire import load, pack_request, unpack_answer
from pd_grpc.prefill.actions import CancelAllocate, SendAllocate
from pd_grpc.prefill.events import AllocateAnswered
from pd_grpc.prefill.peer import DecodePeer, Feed, Metadata
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, TransportFault, read_status
from pd_grpc.protocol.posting import post
from pd_grpc.v1 import decode_pb2

POLL_S = 0.001
"""How often a thread looks for the reply it waits for."""

_TIMED_OUT = TransportFault(Code.DEADLINE_EXCEEDED, "no reply")


def answered(
    asked: SendAllocate, answer: decode_pb2.AllocateResponse | bytes | None
) -> AllocateAnswered:
    """The event for an answer; None is that of one that never came."""
    if answer is None:
        return AllocateAnswered(asked, None, _TIMED_OUT)
    if isinstance(answer, bytes):
        return AllocateAnswered(asked, None, read_status(status_pb2.Status.FromString(answer)))
    return AllocateAnswered(asked, answer, None)


class PreparingThreads:
    """Threads that prepare one request after another, first come first served, whichever D they are
    for; each waits for the reply before it takes the next. `endpoints` maps D to its ROUTER."""

    def __init__(self, threads: int, endpoints: Mapping[str, str]) -> None:
        self._zmq = load("zmq")
        self._endpoints = endpoints
        self._context = self._zmq.Context()
        self._jobs: queue.SimpleQueue[tuple[SendAllocate, _ThreadedPeer] | None]
        self._jobs = queue.SimpleQueue()
        self._numbers = count(1)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"zmq-prepare-{i}") for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def peer(self, endpoint: str, config: PrefillConfig, feed: Feed) -> DecodePeer:
        """What reaches one D; as `PeerFactory`."""
        return _ThreadedPeer(endpoint, config, feed, self._jobs)

    def stop(self) -> None:
        """End the threads; what they wait for stays unanswered."""
        self._stopping.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._context.term()

    def _work(self) -> None:
        sockets: dict[str, Any] = {}
        while (job := self._jobs.get()) is not None:
            asked, peer = job
            if peer.wants(asked):
                socket = sockets.get(asked.endpoint) or self._connect(asked.endpoint)
                sockets[asked.endpoint] = socket
                peer.tell(asked, self._converse(socket, asked))
        for socket in sockets.values():
            socket.close()

    def _connect(self, endpoint: str) -> Any:
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.connect(self._endpoints[endpoint])
        return socket

    def _converse(
        self, socket: Any, asked: SendAllocate
    ) -> decode_pb2.AllocateResponse | bytes | None:
        number = next(self._numbers)
        socket.send(pack_request(number, asked.request))
        until = time.monotonic() + asked.timeout_s
        while time.monotonic() < until and not self._stopping.is_set():
            if not socket.poll(0):
                time.sleep(POLL_S)
                continue
            replied, answer = unpack_answer(socket.recv())
            if replied == number:
                return answer
        return None


class _ThreadedPeer(DecodePeer):
    def __init__(
        self,
        endpoint: str,
        config: PrefillConfig,
        feed: Feed,
        jobs: queue.SimpleQueue[tuple[SendAllocate, _ThreadedPeer] | None],
    ) -> None:
        super().__init__(endpoint, config, feed)
        self._jobs = jobs
        self._asked: dict[tuple[object, int], SendAllocate] = {}

    def allocate(self, asked: SendAllocate, metadata: Metadata) -> None:
        self._asked[asked.key, asked.ask] = asked
        self._jobs.put((asked, self))

    def cancel_allocate(self, cancelled: CancelAllocate) -> None:
        self._asked.pop((cancelled.key, cancelled.ask), None)

    def wants(self, asked: SendAllocate) -> bool:
        """Whether it has not been cancelled meanwhile; from any thread."""
        return (asked.key, asked.ask) in self._asked

    def tell(self, asked: SendAllocate, answer: decode_pb2.AllocateResponse | bytes | None) -> None:
        """Report the end of an Allocate; from any thread. A grant that came after the cancel is
        reported too, for the machine to give back."""
        post(self._loop, self._told, asked, answer)

    def _told(
        self, asked: SendAllocate, answer: decode_pb2.AllocateResponse | bytes | None
    ) -> None:
        self._asked.pop((asked.key, asked.ask), None)
        self._feed(answered(asked, answer))


class AsyncPeers:
    """One asyncio DEALER for each D, any number of Allocates in flight on it."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._zmq = load("zmq")
        self._endpoints = endpoints
        self._context = load("zmq.asyncio").Context()
        self._peers: list[_AsyncPeer] = []

    def peer(self, endpoint: str, config: PrefillConfig, feed: Feed) -> DecodePeer:
        """What reaches one D; as `PeerFactory`."""
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.connect(self._endpoints[endpoint])
        peer = _AsyncPeer(endpoint, config, feed, socket)
        self._peers.append(peer)
        return peer

    def stop(self) -> None:
        """Close the sockets, which the peers have left."""
        for peer in self._peers:
            peer.socket.close()
        self._context.term()


class _AsyncPeer(DecodePeer):
    def __init__(self, endpoint: str, config: PrefillConfig, feed: Feed, socket: Any) -> None:
        super().__init__(endpoint, config, feed)
        self.socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, tuple[SendAllocate, asyncio.TimerHandle]] = {}
        self._number_of: dict[tuple[object, int], int] = {}
        self._reader = asyncio.create_task(self._read())

    def allocate(self, asked: SendAllocate, metadata: Metadata) -> None:
        number = next(self._numbers)
        timer = self._loop.call_later(asked.timeout_s, self._ended, number, None)
        self._waiting[number] = asked, timer
        self._number_of[asked.key, asked.ask] = number
        # A DEALER takes it at once, as long as fewer than a thousand wait for the wire.
        self._spawn(self._send(pack_request(number, asked.request)))

    def cancel_allocate(self, cancelled: CancelAllocate) -> None:
        number = self._number_of.pop((cancelled.key, cancelled.ask), None)
        if number is not None:
            _, timer = self._waiting.pop(number)
            timer.cancel()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])
        for _, timer in self._waiting.values():
            timer.cancel()
        await super().close()

    async def _send(self, message: bytes) -> None:
        await self.socket.send(message)

    async def _read(self) -> None:
        while True:
            number, answer = unpack_answer(await self.socket.recv())
            self._ended(number, answer)

    def _ended(self, number: int, answer: decode_pb2.AllocateResponse | bytes | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            asked, timer = waiting
            timer.cancel()
            del self._number_of[asked.key, asked.ask]
            self._feed(answered(asked, answer))
