"""What the engine computes next: which prepared requests, and which chunk of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.engine.base import PrefillChunk, SampleSpec
from pd_grpc.prefill.states import PrefillRecord
from pd_grpc.protocol.layout import KvLayout


@dataclass(frozen=True)
class Plan:
    """One step: `records` and `chunks` belong together; `admitted` are those of the records that
    are computed for the first time and have just been given their blocks."""

    records: tuple[PrefillRecord, ...]
    chunks: tuple[PrefillChunk, ...]
    admitted: tuple[PrefillRecord, ...]


class PrefillScheduler:
    """First come, first computed, up to `batch` requests and `chunk_tokens` tokens a step.

    A prompt is cut at multiples of `chunk_tokens` from its own beginning, whatever is computed
    beside it, so that its KV is the same in every company. The oldest request always takes part; a
    younger one where its next chunk still fits. A request takes its blocks when it is first
    computed, all of them, and waits while P's pool is full, holding nothing.
    """

    def __init__(self, pool: BlockPool, layout: KvLayout, batch: int, chunk_tokens: int) -> None:
        self._pool = pool
        self._layout = layout
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._ready: deque[PrefillRecord] = deque()
        self._running: list[PrefillRecord] = []
        self._alone: set[int] = set()

    def add(self, record: PrefillRecord) -> None:
        """A request is prepared."""
        self._ready.append(record)

    def remove(self, record: PrefillRecord) -> None:
        """A request is computed, or need not be."""
        self._running = [other for other in self._running if other is not record]
        self._alone.discard(id(record))
        if any(other is record for other in self._ready):
            self._ready = deque(other for other in self._ready if other is not record)

    def suspect(self, records: tuple[PrefillRecord, ...]) -> None:
        """A step of several failed: compute each alone, so that only the one at fault fails."""
        self._alone.update(id(record) for record in records)

    def plan(self) -> Plan | None:
        """The next step; None when there is nothing to compute, or no room to compute it."""
        chosen: list[PrefillRecord] = []
        tokens = 0
        for record in self._running:
            if self._joins(record, chosen, tokens):
                chosen.append(record)
                tokens += self._next_chunk(record)
        admitted: list[PrefillRecord] = []
        while (head := self._admissible()) and self._joins(head, chosen, tokens):
            self._admit(head)
            admitted.append(head)
            chosen.append(head)
            tokens += self._next_chunk(head)
        if not chosen:
            return None
        return Plan(tuple(chosen), tuple(self._chunk(r) for r in chosen), tuple(admitted))

    def _joins(self, record: PrefillRecord, chosen: list[PrefillRecord], tokens: int) -> bool:
        if not chosen:
            return True
        if id(record) in self._alone or id(chosen[0]) in self._alone:
            return False
        return tokens + self._next_chunk(record) <= self._chunk_tokens

    def _admissible(self) -> PrefillRecord | None:
        """The oldest prepared request, if there is room for it. None overtakes it."""
        if not self._ready or len(self._running) >= self._batch:
            return None
        head = self._ready[0]
        return head if self._layout.blocks_for(len(head.tokens)) <= self._pool.free else None

    def _admit(self, record: PrefillRecord) -> None:
        needed = self._layout.blocks_for(len(record.tokens))
        record.holding = self._pool.reserve(needed, BlockState.COMPUTING, str(record.key))
        self._ready.popleft()
        self._running.append(record)

    def _next_chunk(self, record: PrefillRecord) -> int:
        to_boundary = self._chunk_tokens - record.computed % self._chunk_tokens
        return min(to_boundary, len(record.tokens) - record.computed)

    def _chunk(self, record: PrefillRecord) -> PrefillChunk:
        assert record.holding is not None
        end = record.computed + self._next_chunk(record)
        total = len(record.tokens)
        generated = len(record.request.generated_token_ids)
        return PrefillChunk(
            token_ids=record.tokens[record.computed : end],
            start=record.computed,
            block_table=tuple(record.holding.blocks),
            sample=SampleSpec(record.sampling, total, generated) if end == total else None,
        )
