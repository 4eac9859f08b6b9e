"""What must hold on a D after each of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode.deadlines import OfTransfer, TransferTimer
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer

Broken: TypeAlias = Iterator[tuple[str, str]]
"""Invariants that do not hold, each with what was seen."""

_OURS = (DecodeState.DECODING, DecodeState.PREEMPTED)


def broken_rules(ledger: Ledger, receivers: Sequence[Receiver]) -> Broken:
    """Of a D with this ledger, whose shards are `receivers`."""
    for transfer in ledger.transfers.values():
        yield from _of_transfer(ledger, transfer)
        if transfer.receiving and transfer.kv_complete:
            grants = [receiver._grants.get(transfer.grant_id) for receiver in receivers]
            if not all(grant is not None and grant.completed for grant in grants):
                yield "no token from unverified KV", f"a shard lacks some of {transfer.key}"
    live = Counter(t.state for t in ledger.transfers.values())
    if {s: n for s, n in ledger.counts.items() if n and not s.terminal} != live:
        yield "conservation", f"transfers are counted as {ledger.counts}"
    pool = ledger.pool
    known = {id(t.holding) for t in ledger.transfers.values() if t.holding is not None}
    kept = {id(holding) for holding in ledger.quarantine.holdings()}
    if {id(holding) for holding in pool.holdings()} != known | kept:
        yield "conservation", f"nobody has {pool.holdings()}"
    if any(pool.state_of(block) is BlockState.QUARANTINED for block in pool.kept()):
        yield "what may be found is not written to", f"{pool.holdings()}"
    for grant, g in (each for receiver in receivers for each in receiver._grants.items()):
        blocks = {block for at, n in g.wanted for block in g.blocks[at : at + n]}
        if not _may_write(ledger, grant, blocks, g.missing):
            yield "no block is free while it may be written to", grant


def _of_transfer(ledger: Ledger, transfer: Transfer) -> Broken:
    grant, state = transfer.grant_id, transfer.state
    if state.terminal:
        yield "terminal states absorb", f"{transfer.key} has ended and is kept"
    ends = (TransferTimer.BUDGET, TransferTimer.ATTACH, TransferTimer.FIRST_TOKEN)
    timed = any(ledger.timers.at(OfTransfer(grant, timer)) is not None for timer in ends)
    if not timed and grant not in ledger.leases:
        yield "no state without a timer", f"{transfer.key} {state.name}"
    if state in _OURS and transfer.client is None:
        yield "D never decodes without a client", str(transfer.key)
    if state in _OURS and not (transfer.kv_complete or transfer.local):
        yield "no token from unverified KV", str(transfer.key)
    leased = state in (DecodeState.RESERVED, DecodeState.RECEIVING)
    if leased and not transfer.local and grant not in ledger.leases:
        yield "no state without a timer", f"{transfer.key} has no lease"


def _may_write(ledger: Ledger, grant: str, blocks: set[int], missing: int) -> bool:
    """Whether the blocks that a shard would write to are still those of its grant."""
    transfer = ledger.transfers.get(grant)
    if transfer is not None:
        if transfer.kv_complete or transfer.holding is None:
            return True  # What is verified is never written again.
        return blocks <= set(transfer.holding.blocks[transfer.kept_blocks :])
    if not missing:
        return True  # Neither is that of a transfer that has ended.
    kept = ledger.quarantine.holding(grant)
    return kept is not None and blocks <= set(kept.blocks)
