"""What KV that lands does to a D that decodes meanwhile: to its answers, and to small calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from pd_grpc.bench.kv.legs import START_S
from pd_grpc.bench.kv.pool import LAYERS, LAYOUT, KvPool
from pd_grpc.bench.kv.pushing import Pusher
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

TRANSFERS = 8
_BLOCKS = 32
"""Of each transfer: 16 MiB."""
_STREAMS = 4
_OUTPUT = 120
_PROBE_S = 0.01
_CALL_S = 30.0
SETTINGS: Mapping[str, Any] = {
    "engine": "sim",
    "sim_layers": LAYERS,
    "sim_heads": 8,
    "sim_head_dim": 128,
    "block_size": LAYOUT.block_size,
    "num_blocks": 2 * TRANSFERS * _BLOCKS,
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
        heard, until = _Heard(), time.perf_counter() + command["seconds"]
        await asyncio.gather(
            self._probe(heard, until), *(self._ask(heard, until) for _ in range(_STREAMS))
        )
        return heard.__dict__

    async def stop(self) -> None:
        await self._answers.close(None)
        await self._control.close(None)

    async def _ask(self, heard: _Heard, until: float) -> None:
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
                    if tokens and message.token_ids:
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

    async def _probe(self, heard: _Heard, until: float) -> None:
        stub = admin_pb2_grpc.AdminServiceStub(self._control)
        while time.perf_counter() < until:
            began = time.perf_counter()
            await stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=_CALL_S)
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
            self._bytes = 0
            self._pushing = [asyncio.create_task(self._push(i)) for i in range(TRANSFERS)]
            return True
        if command["do"] == "rest":
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
        while True:
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


async def bench_decoding(
    rounds: int, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Quiet and busy stretches of time in turn, on one D. WorkerLost."""
    async with contextlib.AsyncExitStack() as stack:
        launch = partial(_launch, stack)
        d, asker, pusher = [
            await launch(role) for role in ("plain-decode", "kv-asker", "kv-pusher")
        ]
        await d.start(START_S, settings={**SETTINGS, "name": "kv-decode"})
        await pusher.start(START_S, endpoint=d.endpoint)
        await asker.start(START_S, endpoint=d.endpoint)
        await asker.do("watch", START_S, seconds=1.0)
        stretches: dict[str, list[Mapping[str, Any]]] = {"quiet": [], "busy": []}
        landed = 0
        for number in range(rounds):
            for name in ("quiet", "busy") if number % 2 == 0 else ("busy", "quiet"):
                tell(f"a D that decodes: round {number + 1} of {rounds}, {name}")
                if name == "busy":
                    await pusher.do("push")
                stretches[name].append(await asker.do("watch", START_S, seconds=seconds))
                if name == "busy":
                    landed += await pusher.do("rest")
        return decoding_figures(stretches, landed / (rounds * seconds))


def decoding_figures(
    stretches: Mapping[str, Sequence[Mapping[str, Any]]], landed_per_s: float
) -> dict[str, Any]:
    """Of all rounds together, for a p99 takes many."""

    def p99(name: str, of: str) -> float:
        return percentile([ms for heard in stretches[name] for ms in heard[of]], 0.99)

    itl = {name: p99(name, "gaps_ms") for name in stretches}
    control = {name: p99(name, "control_ms") for name in stretches}
    return {
        "itl_p99_under_transfers": itl["busy"] / itl["quiet"],
        "control_p99_under_bulk": control["busy"] / control["quiet"],
        "decoding": {
            "itl_p99_ms": itl,
            "control_p99_ms": control,
            "tokens": {n: sum(len(h["gaps_ms"]) for h in s) for n, s in stretches.items()},
            "landed_gib_per_s": landed_per_s / (1 << 30),
            "failed": sum(h["failed"] for s in stretches.values() for h in s),
            "transfers_at_once": TRANSFERS,
            "settings": dict(SETTINGS),
        },
    }


async def _launch(stack: contextlib.AsyncExitStack, role: str) -> WorkerProcess:
    process = await WorkerProcess.launch(role)
    stack.push_async_callback(process.stop)
    return process
