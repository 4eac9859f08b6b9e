"""What KV that lands does to a D that decodes meanwhile: to its answers, and to small calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from pd_grpc.bench.kv.beside import spinning
from pd_grpc.bench.kv.legs import START_S
from pd_grpc.bench.kv.pool import LAYERS, LAYOUT, KvPool
from pd_grpc.bench.kv.pushing import LIMIT_S, Pusher
from pd_grpc.bench.processes import WorkerProcess
from pd_grpc.bench.statistics import percentile
from pd_grpc.conformance.decode.prefill import KitPrefill
from pd_grpc.conformance.request import Request, prompt_of
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import layout_from_proto
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
    types_pb2,
)

KINDS = ("quiet", "busy", "apart", "spinning")
"""Of stretches: see `READING` of the figures."""
TRANSFERS = 8
_BLOCKS = 32
"""Of each transfer: 16 MiB."""
_STREAMS = 4
_OUTPUT = 800
"""Tokens of a request, which outlasts a stretch: a prompt is computed between the steps of others,
and one step in a hundred is just what a 99th percentile falls upon."""
_SETTLE_S = 0.5
"""Of a stretch, until all streams have begun: for the same reason it does not count."""
_PROBE_S = 0.01
_CALL_S = 30.0
REST_S = LIMIT_S + _CALL_S
"""What a transfer that does not land may take, and giving its blocks back."""
SETTINGS: Mapping[str, Any] = {
    "engine": "sim",
    "sim_layers": LAYERS,
    "sim_heads": 8,
    "sim_head_dim": 128,
    "block_size": LAYOUT.block_size,
    "num_blocks": 3 * TRANSFERS * _BLOCKS,
    "sim_time_scale": 4.0,
    "log_level": "error",
}
"""Of D: blocks of 512 KiB as in the other figures, and steps of some 20 ms."""


@dataclass
class _Heard:
    """What one stretch of time was like for clients, in milliseconds."""

    gaps_ms: list[float] = field(default_factory=list)
    control_ms: list[float] = field(default_factory=list)
    failed: int = 0


class KvAsker:
    """The clients of `endpoint`: streams of tokens, and small calls."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._endpoint = spec["endpoint"]
        self._numbers = 0

    async def start(self) -> Mapping[str, Any]:
        config = PrefillConfig()
        self._answers = rpc.aio_channel(self._endpoint, config, config)
        self._control = rpc.aio_channel(self._endpoint, config, config)
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] != "watch":
            raise ValueError(f"do: {command['do']!r} is nothing that an asker does")
        since = time.perf_counter() + _SETTLE_S
        heard, until = _Heard(), since + command["seconds"]
        await asyncio.gather(
            self._probe(heard, since, until),
            *(self._ask(heard, since, until) for _ in range(_STREAMS)),
        )
        return heard.__dict__

    async def stop(self) -> None:
        await self._answers.close(None)
        await self._control.close(None)

    async def _ask(self, heard: _Heard, since: float, until: float) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(self._answers)
        while time.perf_counter() < until:
            self._numbers += 1
            name = f"asked-{self._numbers}"
            sampling = sampling_pb2.SamplingParams(
                max_tokens=_OUTPUT, temperature=0, seed=1, ignore_eos=True
            )
            request = Request(
                name, prompt_of(name, LAYOUT.block_size, 0), request_id=name, sampling=sampling
            )
            call: Any = stub.Generate(request.generate(local=True), timeout=_CALL_S)
            before, tokens = 0.0, 0
            try:
                async for message in call:
                    now = time.perf_counter()
                    if before >= since and message.token_ids:
                        heard.gaps_ms.append((now - before) * 1000)
                    tokens += len(message.token_ids)
                    before = now
                    if now >= until:
                        call.cancel()
                        return
            except grpc.aio.AioRpcError:
                heard.failed += 1
                return
            heard.failed += tokens != _OUTPUT

    async def _probe(self, heard: _Heard, since: float, until: float) -> None:
        stub = admin_pb2_grpc.AdminServiceStub(self._control)
        while time.perf_counter() < until:
            began = time.perf_counter()
            await stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=_CALL_S)
            if began >= since:
                heard.control_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(_PROBE_S)


class KvPusher:
    """A P without an engine: opens a session with `endpoint`, and on demand has transfers land
    without end, each of which it takes back once it is complete."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._endpoint = spec["endpoint"]
        self._pool = KvPool(TRANSFERS * _BLOCKS, seed=1)
        self._numbers = 0
        self._bytes = 0
        self._pushing: list[asyncio.Task[None]] = []
        self._resting = False

    async def start(self) -> Mapping[str, Any]:
        config = PrefillConfig()
        self._channel = rpc.aio_channel(self._endpoint, config, config)
        info = await inference_pb2_grpc.InferenceServiceStub(self._channel).GetModelInfo(
            inference_pb2.GetModelInfoRequest(), timeout=_CALL_S
        )
        instance = types_pb2.Instance(name="kv-pusher", epoch=1, role=types_pb2.ROLE_PREFILL)
        self._prefill = KitPrefill(self._channel, Transcript(), instance, [info.layout])
        welcome: decode_pb2.Welcome = await self._prefill.join()
        self._layout = layout_from_proto(welcome.layout)
        self._epoch = welcome.instance.epoch
        self._pusher = Pusher(self._layout, self._pool.memory, config)
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "push":
            self._bytes, self._resting = 0, False
            self._pushing = [asyncio.create_task(self._push(i)) for i in range(TRANSFERS)]
            return True
        if command["do"] == "rest":
            # Python 3.11 loses a cancellation that meets the end of what `wait_for` waits for.
            self._resting = True
            for task in self._pushing:
                task.cancel()
            done = await asyncio.gather(*self._pushing, return_exceptions=True)
            for error in done:
                if not isinstance(error, asyncio.CancelledError) and error is not None:
                    raise RuntimeError("pushing failed") from error
            return self._bytes
        raise ValueError(f"do: {command['do']!r} is nothing that a pusher does")

    async def stop(self) -> None:
        await asyncio.to_thread(self._pusher.stop)
        await self._prefill.leave()
        await self._channel.close(None)

    async def _push(self, lane: int) -> None:
        blocks = list(range(lane * _BLOCKS, (lane + 1) * _BLOCKS))
        tokens = _BLOCKS * self._layout.block_size
        over = Fault(Reason.SUPERSEDED, "that was all")
        while not self._resting:
            self._numbers += 1
            name = f"pushed-{self._numbers}"
            request = Request(name, prompt_of(name, tokens, 0), self._epoch, request_id=name)
            grant = await self._prefill.allocate(request)
            try:
                await self._pusher.push(
                    TransferKey(name, 1),
                    grant.shards[0].endpoint,
                    self._prefill.welcome.session_id,
                    grant.grant_id,
                    self._epoch,
                    blocks,
                )
                self._bytes += _BLOCKS * self._layout.block_bytes
            finally:
                self._prefill.held.discard(grant.grant_id)
                # The task may be cancelled; the blocks go back all the same.
                await asyncio.shield(self._prefill.release(request, cause=over))


@dataclass
class Stretches:
    """What was heard in stretches of time of every kind, and how much KV landed meanwhile."""

    heard: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    landed: dict[str, float] = field(default_factory=dict)
    """Bytes a second, a sum over the stretches of a kind."""

    def figures(self) -> dict[str, Any]:
        """Of all rounds together, for a p99 takes many; null where nothing was heard."""
        itl = {name: self._p99(name, "gaps_ms") for name in KINDS}
        control = {name: self._p99(name, "control_ms") for name in KINDS}
        every = [each for stretches in self.heard.values() for each in stretches]
        return {
            "itl_p99_under_transfers": _over(itl, "busy"),
            "control_p99_under_bulk": _over(control, "busy"),
            "itl_p99_beside_bulk_apart": _over(itl, "apart"),
            "control_p99_beside_bulk_apart": _over(control, "apart"),
            "itl_p99_beside_spinning": _over(itl, "spinning"),
            "control_p99_beside_spinning": _over(control, "spinning"),
            "decoding": {
                "itl_p99_ms": itl,
                "control_p99_ms": control,
                "tokens": {n: sum(len(h["gaps_ms"]) for h in s) for n, s in self.heard.items()},
                "landed_gib_per_s": {
                    name: rate / len(self.heard[name]) / (1 << 30)
                    for name, rate in self.landed.items()
                    if self.heard.get(name)
                },
                "failed": sum(each["failed"] for each in every),
                "transfers_at_once": TRANSFERS,
                "settings": dict(SETTINGS),
            },
        }

    def _p99(self, name: str, of: str) -> float | None:
        found = [ms for each in self.heard.get(name, ()) for ms in each[of]]
        return percentile(found, 0.99) if found else None


def _over(p99: Mapping[str, float | None], name: str) -> float | None:
    upper, lower = p99[name], p99["quiet"]
    return None if upper is None or lower is None else upper / lower


async def bench_decoding(
    rounds: int, seconds: float, tell: Callable[[str], None], found: Stretches
) -> None:
    """Stretches of time of every kind in turn, on one D, into `found`. WorkerLost, and RuntimeError
    when transfers do not land."""
    async with contextlib.AsyncExitStack() as stack:
        launch = partial(_launch, stack)
        asker = await launch("kv-asker")
        d, into_d = await _pushed(launch, "kv-decode")
        _, into_another = await _pushed(launch, "kv-another")
        await asker.start(START_S, endpoint=d.endpoint)
        beside: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[None]]] = {
            "quiet": contextlib.nullcontext,
            "busy": partial(_pushing, into_d, found, "busy"),
            "apart": partial(_pushing, into_another, found, "apart"),
            "spinning": spinning,
        }
        await asker.do("watch", START_S, seconds=1.0)
        for number in range(rounds):
            for name in KINDS[:: 1 if number % 2 == 0 else -1]:
                tell(f"a D that decodes: round {number + 1} of {rounds}, {name}")
                async with beside[name]():
                    heard = await asker.do("watch", START_S, seconds=seconds)
                # What landed in a stretch is known by now.
                found.heard.setdefault(name, []).append(heard)


async def _pushed(
    launch: Callable[[str], Awaitable[WorkerProcess]], name: str
) -> tuple[WorkerProcess, WorkerProcess]:
    """A D, and a P that can have transfers land in it."""
    d, pusher = await launch("plain-decode"), await launch("kv-pusher")
    await d.start(START_S, settings={**SETTINGS, "name": name})
    await pusher.start(START_S, endpoint=d.endpoint)
    return d, pusher


@contextlib.asynccontextmanager
async def _pushing(pusher: WorkerProcess, found: Stretches, name: str) -> AsyncIterator[None]:
    """Transfers land; how fast is added to what is known of this kind of stretch."""
    await pusher.do("push")
    began = time.perf_counter()
    yield
    took_s = time.perf_counter() - began
    landed = await pusher.do("rest", REST_S)
    found.landed[name] = found.landed.get(name, 0.0) + landed / took_s


async def _launch(stack: contextlib.AsyncExitStack, role: str) -> WorkerProcess:
    process = await WorkerProcess.launch(role)
    stack.push_async_callback(process.stop)
    return process
