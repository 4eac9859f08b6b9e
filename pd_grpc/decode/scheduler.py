"""What D's engine runs next: one token for each request that decodes, and chunks of local prefill
in what is left of the step's tokens.

It never touches the queue of Allocates; when blocks run out it preempts the youngest request,
whether that decodes or is still being prefilled, which gives its blocks back and is prefilled again
here, ahead of that queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

from pd_grpc.blocks.pool import NoBlocks, blocks_for
from pd_grpc.decode.actions import StepPlan
from pd_grpc.decode.prefix_reuse import PrefixReuse
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.suspects import Suspects
from pd_grpc.decode.transfer import Transfer
from pd_grpc.engine.base import DecodeSlot, PrefillChunk, SampleSpec
from pd_grpc.engine.chunks import ChunkShares, Left, cut_of, step_budget
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
        self._shares = ChunkShares(cut_of(config), config.prefill_batch)
        self._budget = step_budget(config)
        self._preempt = preempt
        self._resume_decoding = resume
        self._running: dict[str, Transfer] = {}
        self._prefilling: dict[str, Transfer] = {}
        self._preempted: dict[str, Transfer] = {}
        self._suspects = Suspects()
        self._turns = count(1)

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
        self._take(transfer)
        self._running[transfer.grant_id] = transfer

    def prefill(self, transfer: Transfer) -> None:
        """Compute its KV here first."""
        self._take(transfer)
        self._prefilling[transfer.grant_id] = transfer

    def drop(self, transfer: Transfer) -> None:
        """Forget it."""
        for table in (self._running, self._prefilling, self._preempted):
            table.pop(transfer.grant_id, None)

    def suspect(self, grant_ids: Sequence[str]) -> None:
        """The engine raised over these together: try them apart before anything else."""
        self._suspects.raised(grant_ids)

    def plan(self, step: int) -> StepPlan | None:
        """The next step; None when nothing can run."""
        self._resume()
        while (suspects := self._suspects.next()) is not None:
            # Those that have ended or were put off meanwhile are not at fault any more.
            plan = self._plan(step, suspects)
            if plan is not None:
                return plan
        return self._plan(step, self._running.keys() | self._prefilling.keys())

    def _plan(self, step: int, among: Collection[str]) -> StepPlan | None:
        # Slots first, for they are never to wait for prompts; and to make room for one, a younger
        # request's re-prefill may be put off.
        slots = self._slots(among)
        chunks = self._chunks(self._budget - len(slots), among)
        if not chunks and not slots:
            return None
        return StepPlan(
            step,
            tuple(t.grant_id for t, _ in chunks),
            tuple(chunk for _, chunk in chunks),
            tuple(t.grant_id for t, _ in slots),
            tuple(slot for _, slot in slots),
        )

    def _take(self, transfer: Transfer) -> None:
        transfer.turn = transfer.turn or next(self._turns)

    def _resume(self) -> None:
        for transfer in _oldest_first(self._preempted.values()):
            try:
                self._reuse.again(transfer)
            except NoBlocks:
                return
            del self._preempted[transfer.grant_id]
            if transfer.kv_tokens < _to_compute(transfer):
                self._prefilling[transfer.grant_id] = transfer
            else:
                self._resume_decoding(transfer)
                self._running[transfer.grant_id] = transfer

    def _chunks(self, room: int, among: Collection[str]) -> list[tuple[Transfer, PrefillChunk]]:
        """Next chunk of each request that takes part in a step with `room` for prompts."""
        waiting = _oldest_first(t for t in self._prefilling.values() if t.grant_id in among)
        prompts = [Left(t.kv_tokens, _to_compute(t) - t.kv_tokens) for t in waiting]
        dealt = self._shares.deal(prompts, min(room, self._config.chunk_tokens))
        return [
            (transfer, self._chunk_of(transfer, tokens))
            for transfer, tokens in zip(waiting, dealt, strict=True)
            if tokens
        ]

    def _chunk_of(self, transfer: Transfer, count: int) -> PrefillChunk:
        start, end = transfer.kv_tokens, transfer.kv_tokens + count
        last = end == _to_compute(transfer) and not transfer.handed_off
        assert transfer.holding is not None
        return PrefillChunk(
            tuple(transfer.tokens[start:end]),
            start,
            tuple(transfer.holding.blocks),
            self._sample(transfer) if last else None,
        )

    def _slots(self, among: Collection[str]) -> list[tuple[Transfer, DecodeSlot]]:
        chosen: list[tuple[Transfer, DecodeSlot]] = []
        for transfer in _oldest_first(t for t in self._running.values() if t.grant_id in among):
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
        position = len(client.prompt) + generated
        output: Sequence[int] = ()
        if client.sampling.structured_output is not None:
            output = (*client.generated, *transfer.output)
        return SampleSpec(client.sampling, position, generated, transfer.tallied(), output)

    def _make_room(self, transfer: Transfer) -> bool:
        """See that its blocks cover one more token, preempting the youngest as often as needed,
        whatever that does; False when it was itself the youngest. So the oldest always goes on, and
        one that has its slot in this step, being older, keeps it."""
        holding = transfer.holding
        assert holding is not None
        needed = blocks_for(transfer.kv_tokens + 1, self._config.block_size)
        while len(holding.blocks) < needed:
            try:
                holding.grow(needed - len(holding.blocks))
            except NoBlocks:
                victim = _oldest_first([*self._running.values(), *self._prefilling.values()])[-1]
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


def _to_compute(transfer: Transfer) -> int:
    """Tokens whose KV prefill computes; that of the newest of a request that has begun to decode is
    written by the decode step that follows."""
    return transfer.total_tokens - transfer.handed_off


def _oldest_first(transfers: Iterable[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda t: t.turn)
