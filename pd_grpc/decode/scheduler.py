"""What D's engine runs next: chunks of local prefill, then one token for each request that decodes.

It never touches the queue of Allocates; when blocks run out it preempts the youngest request, which
gives its blocks back and is prefilled again here, ahead of that queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pd_grpc.blocks.pool import NoBlocks, blocks_for
from pd_grpc.decode.actions import StepPlan
from pd_grpc.decode.prefix_reuse import PrefixReuse
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.engine.base import DecodeSlot, PrefillChunk, SampleSpec
from pd_grpc.protocol.config import EngineConfig


class Scheduler:
    """Plans steps over the transfers that D runs. `preempt` moves one to PREEMPTED, `resume` back
    to DECODING one whose KV was found in the prefix cache, all of it."""

    def __init__(
        self,
        reuse: PrefixReuse,
        config: EngineConfig,
        preempt: Callable[[Transfer], None],
        resume: Callable[[Transfer], None],
    ) -> None:
        self._reuse = reuse
        self._config = config
        self._preempt = preempt
        self._resume_decoding = resume
        self._running: dict[str, Transfer] = {}
        self._prefilling: dict[str, Transfer] = {}
        self._preempted: dict[str, Transfer] = {}

    @property
    def holds_back(self) -> bool:
        """Whether a preempted request waits for blocks, ahead of every Allocate."""
        return bool(self._preempted)

    @property
    def has_work(self) -> bool:
        """Whether anything waits for the engine."""
        return bool(self._running or self._prefilling or self._preempted)

    @property
    def running(self) -> int:
        """How many requests decode."""
        return len(self._running)

    def run(self, transfer: Transfer) -> None:
        """Decode it from the next step on."""
        self._running[transfer.grant_id] = transfer

    def prefill(self, transfer: Transfer) -> None:
        """Compute its KV here first."""
        self._prefilling[transfer.grant_id] = transfer

    def drop(self, transfer: Transfer) -> None:
        """Forget it."""
        for table in (self._running, self._prefilling, self._preempted):
            table.pop(transfer.grant_id, None)

    def plan(self, step: int) -> StepPlan | None:
        """The next step; None when nothing can run."""
        self._resume()
        # Slots first: to make room for one, a younger request's re-prefill may be put off.
        slots = self._slots()
        chunks = self._chunks()
        if not chunks and not slots:
            return None
        return StepPlan(
            step,
            tuple(t.grant_id for t, _ in chunks),
            tuple(chunk for _, chunk in chunks),
            tuple(t.grant_id for t, _ in slots),
            tuple(slot for _, slot in slots),
        )

    def _resume(self) -> None:
        for transfer in _oldest_first(self._preempted.values()):
            try:
                self._reuse.again(transfer)
            except NoBlocks:
                return
            del self._preempted[transfer.grant_id]
            if transfer.kv_tokens < len(transfer.tokens) - 1:
                self._prefilling[transfer.grant_id] = transfer
            else:
                self._resume_decoding(transfer)
                self._running[transfer.grant_id] = transfer

    def _chunks(self) -> list[tuple[Transfer, PrefillChunk]]:
        """Next chunk of each request that prefills, oldest first, at least one and within the
        step's tokens. Boundaries count from the request's own start, so that the same prompt is cut
        alike whoever runs beside it."""
        room = self._config.chunk_tokens
        chosen: list[tuple[Transfer, PrefillChunk]] = []
        for transfer in _oldest_first(self._prefilling.values()):
            if len(chosen) == self._config.prefill_batch:
                break
            chunk = self._chunk_of(transfer)
            if chosen and len(chunk.token_ids) > room:
                break
            room -= len(chunk.token_ids)
            chosen.append((transfer, chunk))
        return chosen

    def _chunk_of(self, transfer: Transfer) -> PrefillChunk:
        again = transfer.state is DecodeState.PREEMPTED
        # The newest token's KV is written by the decode step that follows it.
        tokens = transfer.tokens[:-1] if again else transfer.tokens
        start = transfer.kv_tokens
        to_boundary = self._config.chunk_tokens - start % self._config.chunk_tokens
        ids = tokens[start : start + to_boundary]
        last = start + len(ids) == len(tokens)
        assert transfer.holding is not None
        sample = self._sample(transfer) if last and not again else None
        return PrefillChunk(tuple(ids), start, tuple(transfer.holding.blocks), sample)

    def _slots(self) -> list[tuple[Transfer, DecodeSlot]]:
        chosen: list[tuple[Transfer, DecodeSlot]] = []
        for transfer in _by_handoff(self._running.values()):
            if len(chosen) == self._config.max_batch:
                break
            if transfer.grant_id not in self._running or not self._make_room(transfer):
                continue
            chosen.append((transfer, self._slot_of(transfer)))
        return chosen

    def _slot_of(self, transfer: Transfer) -> DecodeSlot:
        assert transfer.holding is not None
        return DecodeSlot(
            transfer.output[-1],
            transfer.kv_tokens,
            tuple(transfer.holding.blocks),
            self._sample(transfer),
        )

    def _sample(self, transfer: Transfer) -> SampleSpec:
        client = transfer.client
        assert client is not None
        generated = len(client.generated) + len(transfer.output)
        return SampleSpec(client.sampling, len(client.prompt) + generated, generated)

    def _make_room(self, transfer: Transfer) -> bool:
        """See that its blocks cover one more token, preempting the youngest as often as needed;
        False when it was itself the youngest. So the oldest always goes on, and one that has its
        slot in this step, being older, keeps it."""
        holding = transfer.holding
        assert holding is not None
        needed = blocks_for(transfer.kv_tokens + 1, self._config.block_size)
        while len(holding.blocks) < needed:
            try:
                holding.grow(needed - len(holding.blocks))
            except NoBlocks:
                again = (t for t in self._prefilling.values() if t.state is DecodeState.PREEMPTED)
                victim = _by_handoff([*self._running.values(), *again])[-1]
                self._put_off(victim)
                if victim is transfer:
                    return False
        return True

    def _put_off(self, victim: Transfer) -> None:
        assert victim.holding is not None
        victim.holding.release()
        victim.holding = None
        victim.kv_tokens = victim.kept_blocks = 0
        self.drop(victim)
        self._preempted[victim.grant_id] = victim
        if victim.state is not DecodeState.PREEMPTED:
            self._preempt(victim)


def _oldest_first(transfers: Iterable[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: t.created)


def _by_handoff(transfers: Iterable[Transfer]) -> list[Transfer]:
    def age(transfer: Transfer) -> tuple[float, float]:
        assert transfer.handed_off_at is not None
        return transfer.handed_off_at, transfer.created

    return sorted(transfers, key=age)
