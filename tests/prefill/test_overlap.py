"""KV leaves layer by layer: each is in its D while P has yet to compute the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pd_grpc.engine.base import PrefillChunk, Sampled
from pd_grpc.engine.sim import SimEngine
from pd_grpc.prefill import events as ev
from tests.prefill.cluster import request_to, running

TOKENS, CHUNK_BYTES = 128, 4096
PASSES = 2
LONG_S = 10.0
"""Beyond that a layer will not leave before the next one is computed."""


class Waiting(SimEngine):
    """Computes no layer before D has all of those before it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.acked_bytes = 0
        self.in_vain: list[tuple[int, int]] = []
        """After which layer (call, layer) D did not get it."""
        self._calls = 0
        self._computed_bytes = 0
        self._news = threading.Condition()

    def heard(self, event: ev.Event, _: float) -> None:
        """On the control loop."""
        if isinstance(event, ev.KvAcked):
            with self._news:
                self.acked_bytes = event.acked_bytes
                self._news.notify()

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        """On the engine thread."""
        self._calls += 1
        tokens = sum(len(chunk.token_ids) for chunk in batch)
        layer_bytes = tokens // self.layout.block_size * self.layout.layer_bytes(0)
        assert layer_bytes % CHUNK_BYTES == 0, "nothing of a layer waits for more"

        def computed(group: int, layer: int) -> None:
            on_layer(group, layer)
            self._computed_bytes += layer_bytes
            if self._computed_bytes < self.kv_bytes:
                self._await(layer)

        return super().prefill(batch, computed)

    @property
    def kv_bytes(self) -> int:
        """Of the whole prompt."""
        return TOKENS // self.layout.block_size * self.layout.block_bytes

    def _await(self, layer: int) -> None:
        with self._news:
            if not self._news.wait_for(lambda: self.acked_bytes >= self._computed_bytes, LONG_S):
                self.in_vain.append((self._calls, layer))


@pytest.mark.parametrize("chunk_tokens", [TOKENS, TOKENS // 2])
async def test_no_layer_waits_for_the_next_one(chunk_tokens: int) -> None:
    shape: dict[str, Any] = {"sim_layers": 4, "sim_heads": 4, "sim_head_dim": 16}
    async with running() as cluster:
        p = await cluster.prefill(
            engine=Waiting,
            chunk_tokens=chunk_tokens,
            chunk_bytes=CHUNK_BYTES,
            **shape,
        )
        d = await cluster.decode(**shape)
        engine = p.engine
        assert isinstance(engine, Waiting)
        p.runtime.event_listeners.append(engine.heard)
        request = request_to(d, tokens=TOKENS)
        prefill, generate = await cluster.run(p, d, request)
        assert (prefill.fault, generate.fault) == (None, None)
        assert engine.in_vain == []
        assert engine.acked_bytes == engine.kv_bytes


async def test_over_shm_the_layers_of_a_pass_that_are_soon_copied_go_together() -> None:
    """Each slab costs either end processor time, and copying so little makes nobody wait."""
    shape: dict[str, Any] = {"sim_layers": 4, "sim_heads": 4, "sim_head_dim": 16}
    settings = {**shape, "transports": ("shm",)}
    acked: list[int] = []

    def heard(event: ev.Event, _: float) -> None:
        if isinstance(event, ev.KvAcked):
            acked.append(event.acked_bytes)

    async with running() as cluster:
        p = await cluster.prefill(
            chunk_tokens=TOKENS // PASSES, chunk_bytes=CHUNK_BYTES, sim_time_scale=5.0, **settings
        )
        d = await cluster.decode(**settings)
        p.runtime.event_listeners.append(heard)
        prefill, generate = await cluster.run(p, d, request_to(d, tokens=TOKENS))
        assert (prefill.fault, generate.fault) == (None, None)
        assert acked[-1] == TOKENS // d.engine.layout.block_size * d.engine.layout.block_bytes
        assert len(acked) <= PASSES
