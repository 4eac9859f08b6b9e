"""How much of sending is left over when computing has ended, on a link as slow as the compute."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pd_grpc.bench.kv.legs import START_S
from pd_grpc.bench.kv.pool import MIB
from pd_grpc.bench.legs import BenchRequest, generate_request, prefill_request
from pd_grpc.bench.processes import WorkerProcess
from pd_grpc.engine.step_table import INVENTED_STEPS
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import inference_pb2_grpc, prefill_pb2_grpc

TOKENS = 2048
LAYERS = 16
_WARM_UP = 1
"""Requests that count for nothing: the first one of a process takes longer."""
_TOKEN_BYTES = LAYERS * 2 * 8 * 128
_PIECE_BYTES = 1 << 16
_HOST = "127.0.0.1"
_CALL_S = 120.0


class PacedLink:
    """The way to a port of this machine: so many bytes a second to it, for all connections
    together, and as many as there are back."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = self._overslept = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.upstream = ""
        """host:port behind it."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen; host:port."""
        server = await asyncio.start_server(self._serve, _HOST, 0)
        try:
            yield f"{_HOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.upstream.rpartition(":")
        from_d, to_d = await asyncio.open_connection(host, int(port))
        both = {
            asyncio.create_task(self._pass(reader, to_d, paced=True)),
            asyncio.create_task(self._pass(from_d, writer, paced=False)),
        }
        self._tasks |= both
        await asyncio.wait(both)
        self._tasks -= both

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, paced: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_PIECE_BYTES):
                    if paced:
                        # What the last sleep overslept is made up for; a link that was idle has
                        # saved nothing.
                        start = max(self._free_at, loop.time() - self._overslept)
                        self._free_at = start + len(data) / self._rate
                        await asyncio.sleep(self._free_at - loop.time())
                        self._overslept = max(0.0, loop.time() - self._free_at)
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


@dataclass
class Overlap:
    """What came of the requests of a run, whose layers take `compute_s`."""

    compute_s: float = 0.0
    runs: list[tuple[float, float]] = field(default_factory=list)
    """Of each request the seconds of compute, and of sending after it."""

    def figures(self) -> dict[str, Any]:
        """Null where there was no request."""
        if not self.runs:
            return {"exposed_over_layer_share": None, "overlap": None}
        # A layer's share of the time of the table: hashing all tokens before the first layer is
        # sim's own, and overlaps nothing.
        shares = [exposed / (self.compute_s / LAYERS) for _, exposed in self.runs]
        return {
            "exposed_over_layer_share": statistics.median(shares),
            "overlap": {
                "tokens": TOKENS,
                "layers": LAYERS,
                "kv_mib": TOKENS * _TOKEN_BYTES / MIB,
                "link_mib_per_s": TOKENS * _TOKEN_BYTES / MIB / self.compute_s,
                "layers_s": self.compute_s,
                "compute_s": [compute for compute, _ in self.runs],
                "exposed_send_s": [exposed for _, exposed in self.runs],
                "over_layer_share": shares,
            },
        }


async def bench_overlap(
    rounds: int, compute_s: float, tell: Callable[[str], None], found: Overlap
) -> None:
    """A prompt of 2,048 tokens whose layers take `compute_s` in P's engine and as long on the link,
    `rounds` times into `found`. WorkerLost; RuntimeError when a request is not answered right."""
    found.compute_s = compute_s
    link = PacedLink(TOKENS * _TOKEN_BYTES / compute_s)
    settings = {
        "engine": "sim",
        "sim_layers": LAYERS,
        "sim_heads": 8,
        "sim_head_dim": 128,
        "num_blocks": 3 * TOKENS // 16,
        "chunk_tokens": TOKENS,
        "sim_time_scale": compute_s * 1000 / INVENTED_STEPS.prefill_ms(TOKENS),
        "log_level": "error",
    }
    async with contextlib.AsyncExitStack() as stack:
        advertised = await stack.enter_async_context(link.open())
        d = await _launch(stack, "plain-decode")
        p = await _launch(stack, "plain-prefill")
        about_d = {**settings, "name": "d", "bulk_advertise": advertised, "sim_time_scale": 0.0}
        await d.start(START_S, settings=about_d)
        link.upstream = d.about["bulk"]
        await p.start(START_S, settings={**settings, "name": "p"})
        for number in range(_WARM_UP + rounds):
            tell(f"sending beside computing: {number + 1} of {_WARM_UP + rounds}")
            request = BenchRequest(f"overlap-{number}", TOKENS, 2, (("d", d.endpoint),))
            run = await _hand_over(p.endpoint, d.endpoint, request)
            if number >= _WARM_UP:
                found.runs.append(run)


async def _hand_over(p: str, d: str, request: BenchRequest) -> tuple[float, float]:
    """Seconds of compute, and of sending after it, as P tells them."""
    config = PrefillConfig()
    async with (
        rpc.aio_channel(p, config, config) as to_p,
        rpc.aio_channel(d, config, config) as to_d,
    ):
        generate = inference_pb2_grpc.InferenceServiceStub(to_d).Generate
        prefill = prefill_pb2_grpc.PrefillServiceStub(to_p).Prefill
        client: Any = generate(generate_request(request, "d"), timeout=_CALL_S)
        found: Mapping[str, float] | None = None
        async for message in prefill(prefill_request(request), timeout=_CALL_S):
            if message.HasField("handed_off"):
                timings = message.handed_off.timings
                found = {"compute": seconds(timings.compute), "sent": seconds(timings.exposed_send)}
        tokens = 0
        async for answer in client:
            tokens += len(answer.token_ids)
    if found is None or tokens != request.output:
        raise RuntimeError(f"{request.transfer_id}: {tokens} tokens, handed off: {found}")
    return found["compute"], found["sent"]


async def _launch(stack: contextlib.AsyncExitStack, role: str) -> WorkerProcess:
    process = await WorkerProcess.launch(role)
    stack.push_async_callback(process.stop)
    return process
