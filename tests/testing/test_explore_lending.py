"""Ps that write into D's memory, in orders of events that were found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.testing.explore import replay, walk
from pd_grpc.testing.explorer.decode_process import DecodeProcess
from pd_grpc.testing.explorer.kv import BLOCK_BYTES
from pd_grpc.testing.explorer.scenario import HEIR, LENT_ONE, ONE_SIDED
from pd_grpc.testing.explorer.world import State, World

LATE_END = """\
start c1
up generate:c1>d1:100/t1#1/0
up prefill:c1>p1:100/t1#1
up session:p1>d1:100/1
down session:p1>d1:100/1
bulk p1
down prefill:c1>p1:100/t1#1
up lend:p1>d1:100/pool
news d1
down lend:p1>d1:100/pool
news p1
up allocate:p1>d1:100/t1#1/1
bulk d1
down allocate:p1>d1:100/t1#1/1
step p1
down prefill:c1>p1:100/t1#1
step p1
down prefill:c1>p1:100/t1#1
bulk p1
bulk p1
bulk p1
up transfer:p1>d1:100/t1#1/0/1
news d1
down transfer:p1>d1:100/t1#1/0/1
up first:p1>d1:100/t1#1/1
down generate:c1>d1:100/t1#1/0
land p1
down first:p1>d1:100/t1#1/1
up transfer:p1>d1:100/t1#1/0/1
up transfer:p1>d1:100/t1#1/0/1
down transfer:p1>d1:100/t1#1/0/1
leave c1
down transfer:p1>d1:100/t1#1/0/1
up generate:c1>d1:100/t1#1/0
news p1
news p1
down session:p1>d1:100/1
news d1
down transfer:p1>d1:100/t1#1/0/1
news p1
news d1
bulk d1
news d1""".splitlines()
"""D's shard has taken P's End, and its client leaves before the machine hears of that: P has said
all that it will."""

FINE = replace(LENT_ONE, fine=True)


def test_an_end_that_comes_after_the_end_of_its_transfer_is_heard() -> None:
    world, state, wrong = replay(FINE, LATE_END)

    assert not wrong
    d = decode(world, state)
    assert len(d.machine.ledger.quarantine) == 0
    assert d.pool.free == d.pool.total


def test_an_end_that_is_not_heard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_heard(self: DecodeMachine, event: Any) -> None:
        transfer = self._receiving(event.grant_id)
        if transfer is not None:
            self._handoff.kv_completed(transfer)

    monkeypatch.setattr(DecodeMachine, "_receive_completed", not_heard)
    _, _, wrong = replay(FINE, LATE_END)

    assert [each.text for each in wrong] == [
        "d1: it keeps the blocks of t1#1 for p1, which writes no more"
    ]


def go(world: World, state: State, until: str, without: str) -> State:
    """Make the first moves that can be made, but for one, until another can be or none is left."""
    while True:
        moves = {world.label(move): move for move in world.moves(state)}
        going = [move for label, move in moves.items() if label not in (without, "pass")]
        if until in moves or not going:
            return state
        state, wrong = world.after(state, going[0])
        assert not wrong


def made(world: World, state: State, label: str) -> State:
    choices = [*world.moves(state), *world.faults(state)]
    (move,) = (each for each in choices if world.label(each) == label)
    state, wrong = world.after(state, move)
    assert not wrong
    return state


def decode(world: World, state: State) -> DecodeProcess:
    process = world.process(state, "d1")
    assert isinstance(process, DecodeProcess)
    return process


def test_a_write_of_a_stopped_process_lands_when_it_is_continued_and_harms_nobody() -> None:
    """Its successor is there, and waits for the blocks."""
    world = World(HEIR)
    state = go(world, world.root(), until="land p1", without="start c2")
    state = made(world, state, "freeze p1")
    state = go(world, state, until="", without="thaw p1")
    d = decode(world, state)
    (held,) = d.machine.ledger.quarantine.holdings()
    assert d.machine.ledger.reservations.head, "the second request waits"
    blocks, empty = list(held.blocks), bytes(BLOCK_BYTES)
    assert [d.memory.cells[block] for block in blocks] == [empty] * len(blocks)
    for _ in range(3):
        state = go(world, made(world, state, "pass"), until="", without="thaw p1")
    assert len(decode(world, state).machine.ledger.quarantine) == 1, "time frees nothing"

    state = made(world, made(world, state, "thaw p1"), "land p1")

    assert any(decode(world, state).memory.cells[block] != empty for block in blocks)
    assert world.wrong_at_the_end(state, faults=1)[1] == []


def test_nothing_goes_wrong_on_walks_beside_writers() -> None:
    lands = 0
    for seed in range(60):
        scenario = replace(ONE_SIDED[seed % len(ONE_SIDED)], fine=True)
        walked = walk(scenario, seed)
        assert not walked.found, walked
        lands += sum(move.startswith("land") for move in walked.moves)
    assert lands > 20
