"""Faults planted into what D prefills itself, into who gives way, and into rows of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pd_grpc.blocks.pool import BlockPool, NoBlocks, blocks_for
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.engine_desk import EngineDesk
from pd_grpc.decode.scheduler import Scheduler
from pd_grpc.decode.states import DecodeState
from pd_grpc.engine.base import SampleSpec
from pd_grpc.prefill.compute import Compute
from pd_grpc.prefill.scheduler import PrefillScheduler
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.testing.explorer.kv import BLOCK
from pd_grpc.testing.explorer.scenario import (
    ALIKE_AND_SPOILT,
    ALONE,
    ALONE_AGAIN,
    AT_ONE_P,
    OF_ROWS,
    ONE_AT_A_TIME,
    SMALL,
)
from tests.testing.planting import Planted, nothing, with_only

_GIVING_WAY = with_only(ALONE)
_AT_ONE_P = with_only(AT_ONE_P, *OF_ROWS)
_ONE = with_only(SMALL, "spoil")
_SPOILT_AT_P = with_only(ALIKE_AND_SPOILT, "spoil")
_ROWS = replace(ALONE, prompts=(3, 3), decode_blocks=6, faults=OF_ROWS)

_put_off = Scheduler._put_off
_chunk_of = Scheduler._chunk_of
_done = EngineDesk.done


def _room_from(self: Scheduler, transfer: Any, ranked: Any) -> bool:
    """As `Scheduler._make_room`, with the victim last in `ranked`."""
    needed = blocks_for(transfer.kv_tokens + 1, BLOCK)
    while len(transfer.holding.blocks) < needed:
        try:
            transfer.holding.grow(needed - len(transfer.holding.blocks))
        except NoBlocks:
            victim = ranked(self)[-1]
            self._put_off(victim)
            if victim is transfer:
                return False
    return True


def _oldest(self: Scheduler, transfer: Any) -> bool:
    every = [*self._running.values(), *self._prefilling.values()]
    return _room_from(self, transfer, lambda s: sorted(every, key=lambda t: -t.turn))


def _no_prompt(self: Scheduler, transfer: Any) -> bool:
    return _room_from(self, transfer, lambda s: sorted(s._running.values(), key=lambda t: t.turn))


def _turn_lost(self: Scheduler, victim: Any) -> None:
    _put_off(self, victim)
    self._take(victim)
    victim.turn = next(self._turns)


def _computed_still(self: Scheduler, victim: Any) -> None:
    computed = victim.kv_tokens
    _put_off(self, victim)
    again = self._reuse.again

    def with_what_was(transfer: Any) -> None:
        again(transfer)
        if transfer is victim and not transfer.handed_off:
            transfer.kv_tokens = computed

    self._reuse.again = with_what_was  # type: ignore[method-assign]


def _blocks_forgotten(self: Scheduler, victim: Any) -> None:
    # Released, and still in the table that the engine is given.
    blocks = victim.holding
    _put_off(self, victim)
    del self._preempted[victim.grant_id]
    victim.holding = blocks
    self._prefilling[victim.grant_id] = victim


def _sampled_too_early(self: Scheduler, transfer: Any, count: int) -> Any:
    chunk = _chunk_of(self, transfer, count)
    spec: SampleSpec | None = None if transfer.handed_off else self._sample(transfer)
    return replace(chunk, sample=chunk.sample or spec)


def _all_failed(self: EngineDesk, event: Any) -> None:
    plan = self._finish_step(event.step)
    assert plan is not None
    for grant_id in plan.prefill_grants + plan.decode_grants:
        if grant_id in self._ledger.transfers:
            transfer = self._ledger.transfers[grant_id]
            self._ledger.end(transfer, DecodeState.FAILED, event.fault)


def _tried_again(self: EngineDesk, event: Any) -> None:
    self._finish_step(event.step)


def _taken_for_a_token(self: EngineDesk, transfer: Any, sampled: Any) -> bool:
    return False


def _all_without(self: EngineDesk, event: Any) -> None:
    faults = [s.fault for s in (*event.prefilled, *event.decoded) if s is not None and s.fault]
    given = [replace(s, fault=faults[0]) if s and faults else s for s in event.prefilled]
    then = [replace(s, fault=faults[0]) if faults else s for s in event.decoded]
    _done(self, replace(event, prefilled=given, decoded=then))


def _all_failed_at_p(self: Compute, step: int, message: str, now: float) -> None:
    plan = self._finish(step)
    assert plan is not None
    for record in plan.records:
        if record.state.terminal:
            self._requests.return_blocks(record)
        else:
            self._fail(record, Fault(Reason.ENGINE_ERROR, message), now, True)


_compute_done = Compute.done


def _token_of_nothing(self: Compute, step: int, results: Any, now: float) -> None:
    _compute_done(self, step, [s and replace(s, fault="") for s in results], now)


_distrust = PrefixCache.distrust
_keep_no_more = BlockPool.keep_no_more


def _last_block_alone(self: PrefixCache, blocks: Any) -> None:
    _distrust(self, blocks[-1:])


def _free_at_once(self: BlockPool, blocks: Any) -> None:
    _keep_no_more(self, blocks)
    self._free.extend(blocks)


LOCAL = [
    Planted("the oldest gives way", Scheduler, "_make_room", _oldest, _GIVING_WAY),
    Planted("a prompt never gives way", Scheduler, "_make_room", _no_prompt, _GIVING_WAY),
    Planted("who gives way begins at the end", Scheduler, "_put_off", _turn_lost, _GIVING_WAY),
    Planted(
        "a prompt that gave way is thought to be computed",
        Scheduler,
        "_put_off",
        _computed_still,
        _GIVING_WAY,
    ),
    Planted(
        "who gives way goes on in its blocks",
        Scheduler,
        "_put_off",
        _blocks_forgotten,
        _GIVING_WAY,
    ),
    Planted(
        "D chooses a token before it has the prompt",
        Scheduler,
        "_chunk_of",
        _sampled_too_early,
        ALONE_AGAIN,
    ),
    Planted("D keeps its own requests waiting", ClientDesk, "granted", nothing, ONE_AT_A_TIME),
    Planted("a step of D fails all who are in it", EngineDesk, "failed", _all_failed, _ROWS),
    Planted("who makes D's engine raise is kept", EngineDesk, "failed", _tried_again, _ROWS),
    Planted("D shows a token that is none", EngineDesk, "_failed", _taken_for_a_token, _ROWS),
    Planted("a row without a token of D fails all", EngineDesk, "done", _all_without, _ROWS),
    Planted(
        "a step of P fails all who are in it", Compute, "failed", _all_failed_at_p, _AT_ONE_P, 1
    ),
    Planted("P sends a token that is none", Compute, "done", _token_of_nothing, _ONE),
    Planted("D trusts what gave no numbers", EngineDesk, "_distrust", nothing, ALIKE_AND_SPOILT),
    Planted("P trusts what gave no numbers", PrefillScheduler, "distrust", nothing, _SPOILT_AT_P),
    Planted(
        "only the last block of what gave no numbers is distrusted",
        PrefixCache,
        "distrust",
        _last_block_alone,
        ALIKE_AND_SPOILT,
    ),
    Planted(
        "what gave no numbers is free though another holds it",
        BlockPool,
        "keep_no_more",
        _free_at_once,
        ALIKE_AND_SPOILT,
    ),
]
