"""What the engine computes next: which prepared requests, and which chunk of each."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.blocks.pool import BlockState, Holding
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.engine.base import PrefillChunk, SampleSpec
from pd_grpc.engine.chunks import ChunkShares, Left
from pd_grpc.engine.penalties import tally
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
    """The Ds in turn, and for each D first come, first computed; up to `batch` requests and
    `chunk_tokens` tokens a step.

    A D that is slow to answer grants many at once. In turn they are computed beside those for the
    other Ds, which otherwise would stand behind them all.

    A prompt is cut at multiples of `cut` from its own beginning, whatever is computed beside it, so
    that its KV is the same in every company; `ChunkShares` says how much of whom a step computes. A
    request takes its blocks when it is first computed, all of them, and waits while P's pool is
    full, holding nothing. Of these blocks the first may be cached ones, which it shares and which
    are not computed again; the last token always is, for the one that follows it.

    A D that takes its KV slowly, or not at all, keeps the blocks of its requests busy. So each D
    may hold its share of the pool and no more, with one share left for a D that is not at work yet;
    requests for another D then overtake, those for the same D never. A request larger than the
    share is computed when its D holds nothing.
    """

    def __init__(
        self, cache: PrefixCache, layout: KvLayout, batch: int, chunk_tokens: int, cut: int
    ) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._layout = layout
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._shares = ChunkShares(cut, batch)
        self._ready: OrderedDict[str, deque[PrefillRecord]] = OrderedDict()
        """By D, the one whose turn was longest ago first."""
        self._running: list[PrefillRecord] = []
        self._alone: set[int] = set()
        self._held: dict[str, list[Holding]] = {}

    def add(self, record: PrefillRecord) -> None:
        """A request is prepared."""
        self._ready.setdefault(record.target.endpoint, deque()).append(record)

    def waiting(self) -> list[PrefillRecord]:
        """Those that are prepared and not begun."""
        return [record for records in self._ready.values() for record in records]

    def remove(self, record: PrefillRecord) -> None:
        """A request is computed, or need not be."""
        self._running = [other for other in self._running if other is not record]
        self._alone.discard(id(record))
        self._leave(record)

    def keep(self, record: PrefillRecord) -> None:
        """Let others find the whole blocks of a request that are computed."""
        whole = record.computed // self._layout.block_size
        if not self._cache.enabled or record.holding is None or whole <= record.kept_blocks:
            return
        names = record.chain.names(record.tokens, whole)
        self._cache.add(names, record.holding.blocks, record.kept_blocks)
        record.kept_blocks = whole

    def distrust(self, blocks: Sequence[int]) -> None:
        """What these hold may be wrong: let nobody find it."""
        self._cache.distrust(blocks)

    def suspect(self, records: tuple[PrefillRecord, ...]) -> None:
        """A step of several failed: compute each alone, so that only the one at fault fails."""
        self._alone.update(id(record) for record in records)

    def plan(self, admit: bool = True) -> Plan | None:
        """The next step; None when there is nothing to compute, or no room to compute it. `admit`
        says whether a request may begin."""
        records = self._together()
        dealt = self._deal(records)
        admitted: list[PrefillRecord] = []
        while admit and self._takes_more(records) and (head := self._admissible()):
            with_head = self._deal([*records, head])
            # Whoever has a part of the step keeps one.
            if not all(
                after for before, after in zip([*dealt, 1], with_head, strict=True) if before
            ):
                break
            self._admit(head)
            admitted.append(head)
            records, dealt = [*records, head], with_head
        chosen = [(r, tokens) for r, tokens in zip(records, dealt, strict=True) if tokens]
        if not chosen:
            return None
        chunks = tuple(self._chunk(record, tokens) for record, tokens in chosen)
        return Plan(tuple(record for record, _ in chosen), chunks, tuple(admitted))

    def _together(self) -> list[PrefillRecord]:
        """Those begun that may be computed in one step, oldest first."""
        if self._running and id(self._running[0]) in self._alone:
            return self._running[:1]
        return [record for record in self._running if id(record) not in self._alone]

    def _takes_more(self, records: list[PrefillRecord]) -> bool:
        return not records or id(records[0]) not in self._alone

    def _deal(self, records: list[PrefillRecord]) -> list[int]:
        return self._shares.deal([self._left(record) for record in records], self._chunk_tokens)

    def _left(self, record: PrefillRecord) -> Left:
        start = record.computed
        if record.holding is None:
            start = len(self._cache.find(self._names(record))) * self._layout.block_size
        return Left(start, len(record.tokens) - start)

    def _admissible(self) -> PrefillRecord | None:
        """The oldest prepared request of the D whose turn it is, of those that have not used up
        their share, if there is room for it. For lack of room none overtakes it."""
        if not self._ready or len(self._running) >= self._batch:
            return None
        held = self._held_by_decode()
        share = self._pool.total // (1 + len(held.keys() | self._ready.keys()))
        for decode, records in self._ready.items():
            needed = self._blocks(records[0])
            if decode in held and held[decode] + needed > share:
                continue
            return records[0] if self._cache.has_room(needed, self._names(records[0])) else None
        return None

    def _held_by_decode(self) -> dict[str, int]:
        """Blocks of P that each D keeps busy, for the Ds that do."""
        for decode, holdings in list(self._held.items()):
            left = [holding for holding in holdings if not holding.released]
            if left:
                self._held[decode] = left
            else:
                del self._held[decode]
        return {decode: sum(len(h.blocks) for h in held) for decode, held in self._held.items()}

    def _blocks(self, record: PrefillRecord) -> int:
        return self._layout.blocks_for(len(record.tokens))

    def _names(self, record: PrefillRecord) -> list[bytes]:
        """Of the blocks that need not be computed where they are found."""
        if not self._cache.enabled:
            return []
        whole = (len(record.tokens) - 1) // self._layout.block_size
        return record.chain.names(record.tokens, whole)

    def _admit(self, record: PrefillRecord) -> None:
        holding, cached = self._cache.reserve(
            self._blocks(record), self._names(record), BlockState.COMPUTING, str(record.key)
        )
        record.holding = holding
        record.kept_blocks = cached
        record.computed = record.cached_tokens = cached * self._layout.block_size
        decode = record.target.endpoint
        self._held.setdefault(decode, []).append(holding)
        self._leave(record)
        if decode in self._ready:
            self._ready.move_to_end(decode)
        self._running.append(record)

    def _leave(self, record: PrefillRecord) -> None:
        """A request waits to be computed no more."""
        decode = record.target.endpoint
        left = deque(other for other in self._ready.get(decode, ()) if other is not record)
        if left:
            self._ready[decode] = left
        else:
            self._ready.pop(decode, None)

    def _chunk(self, record: PrefillRecord, tokens: int) -> PrefillChunk:
        assert record.holding is not None
        end = record.computed + tokens
        return PrefillChunk(
            token_ids=record.tokens[record.computed : end],
            start=record.computed,
            block_table=tuple(record.holding.blocks),
            sample=_sample(record) if end == len(record.tokens) else None,
        )


def _sample(record: PrefillRecord) -> SampleSpec:
    generated = len(record.request.generated_token_ids)
    total = len(record.tokens)
    so_far = None
    if record.sampling.penalises:
        prompt = total - generated
        so_far = tally(record.tokens[:prompt], record.tokens[prompt:])
    output = record.request.generated_token_ids[:] if record.sampling.structured_output else ()
    return SampleSpec(record.sampling, total, generated, so_far, output)
