"""An engine that only takes its time: no KV is computed and no token means anything.

The sim engine hashes every token, 0.1 ms for each slot of a step; with 256 of them that would be
most of a scaled step and hide what is compared. Blocks are reserved, sent, acknowledged and freed
all the same, and every answer has as many tokens as were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pd_grpc.engine.base import DecodeSlot, Engine, PrefillChunk, Sampled
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.sim_tokenizer import FIRST_WORD_ID, SimTokenizer
from pd_grpc.engine.step_table import StepTable
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind

MODEL_LEN = 1 << 16
_TOKEN = Sampled(FIRST_WORD_ID)
_SAME_RUN = 3.0
"""After a longer pause than so many steps D had nothing to decode."""


class TimedEngine(Engine):
    """Sleeps by `steps`, `time_scale` times as long.

    What D's host does between two steps that follow each other overlaps them, as in engines that
    plan ahead: where the last decode step ended less than `_SAME_RUN` steps ago, the next counts
    from its end, or from as long ago as it takes, so that a step takes its time or the host's,
    whichever is longer. P's does not, for its pauses may be waits for a grant.
    """

    def __init__(
        self,
        config: EngineConfig,
        steps: StepTable,
        time_scale: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = "timed"
        plane = Plane(PlaneKind.K, "uint8", 1, 16)
        self.layout = KvLayout(
            model="timed-v1",
            positions="none",
            block_size=config.block_size,
            groups=(KvGroup(GroupKind.FULL, 1, (plane,)),),
        )
        buffer = bytearray(config.num_blocks * self.layout.block_bytes)
        self.memory = HostKvMemory(buffer, self.layout)
        self.vocab_size = config.sim_vocab
        self.max_model_len = config.max_model_len or MODEL_LEN
        self.eos_token_ids = frozenset()
        self.features = frozenset()
        self.chunks_computed = 0
        self.on_step: Callable[[bool], None] = lambda running: None
        """Called on the engine thread with True when a step begins, with False when it ends."""
        self._tokenizer = SimTokenizer(config.sim_vocab)
        self._steps = steps
        self._scale = time_scale
        self._now = now
        self._sleep = sleep
        self._decoded_at = 0.0

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        step_ms = self._steps.prefill_ms(sum(len(chunk.token_ids) for chunk in batch))
        self.on_step(True)
        self._sleep(step_ms / 1000 * self._scale)
        self.on_step(False)
        self.chunks_computed += len(batch)
        on_layer(0, 0)
        return [None if chunk.sample is None else _TOKEN for chunk in batch]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        context = sum(slot.position for slot in batch)
        step_s = self._steps.decode_ms(len(batch), context) / 1000 * self._scale
        self.on_step(True)
        now = self._now()
        begun = now
        if now - self._decoded_at < _SAME_RUN * step_s:
            begun = max(self._decoded_at, now - step_s)
        self._sleep(max(0.0, begun + step_s - now))
        self._decoded_at = max(now, begun + step_s)
        self.on_step(False)
        return [_TOKEN] * len(batch)

    def tokenizer(self) -> SimTokenizer:
        return self._tokenizer
