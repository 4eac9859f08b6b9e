"""Several shards: what one of them lacks or finds wrong concerns the whole request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_grpc.prefill.handover import Handover
from pd_grpc.protocol.faults import Reason
from pd_grpc.testing.explore import explore, replay, walk
from pd_grpc.testing.explorer.client_process import ClientProcess
from pd_grpc.testing.explorer.decode_process import DecodeProcess
from pd_grpc.testing.explorer.scenario import SHARDED, SHARDED_BOTH, SHARDS, Scenario
from pd_grpc.testing.explorer.world import State, World

pytestmark = pytest.mark.longest


@pytest.mark.parametrize("scenario", SHARDS)
def test_one_request_goes_well_in_every_order_without_a_fault(scenario: Scenario) -> None:
    report = explore(states=10_000, scenarios=[scenario], most_faults=0)

    assert not report.found, "\n".join(report.lines())
    (searched,) = report.searches
    assert searched.layers[0].whole and report.states > 500


@pytest.mark.parametrize("scenario", SHARDS)
def test_nothing_goes_wrong_on_walks_with_faults(scenario: Scenario) -> None:
    faults = 0
    for seed in range(30):
        walked = walk(replace(scenario, fine=True), seed, chance=0.2)
        assert not walked.found, walked
        faults += walked.faults
    assert faults > 30


@pytest.mark.parametrize("scenario", [SHARDED, SHARDED_BOTH])
def test_what_one_shard_finds_wrong_ends_the_request_on_all(scenario: Scenario) -> None:
    """Each of them has all of its KV in one chunk, its last."""
    scenario = replace(scenario, faults=("corrupt",), fine=True)
    shards = set()
    for seed in range(40):
        walked = walk(scenario, seed, most_faults=1, chance=0.5)
        assert not walked.found, walked
        wrong = [move for move in walked.moves if move.startswith("corrupt")]
        if not wrong:
            continue
        shards.add(wrong[0].endswith("@1"))
        world, state, _ = replay(scenario, walked.moves)
        client, d = world.process(state, "c1"), world.process(state, "d1")
        assert isinstance(client, ClientProcess) and isinstance(d, DecodeProcess)
        assert client.result == Reason.KV_CORRUPT.name
        assert not any(receiver._grants for receiver in d.receivers)
        assert d.pool.free == d.pool.total
    assert shards == {False, True}


def go(world: World, state: State, *labels: str) -> State:
    """Make moves of these beginnings, one of each."""
    for label in labels:
        choices = [*world.moves(state), *world.faults(state)]
        move = next(move for move in choices if world.label(move).startswith(label))
        state, wrong = world.after(state, move)
        assert not wrong
    return state


def free_blocks(world: World, state: State) -> int:
    d = world.process(state, "d1")
    assert isinstance(d, DecodeProcess)
    return d.pool.free


def test_blocks_are_free_when_the_last_shard_has_closed() -> None:
    """The client leaves while both shards let KV in, and each closes the grant in its own time."""
    world = World(replace(SHARDED, fine=True))
    state = world.root()
    while not any(world.label(move) == "bulk@1 d1" for move in world.moves(state)):
        state, _ = world.after(state, world.moves(state)[0])
    state = go(world, state, "bulk d1", "bulk@1 d1", "leave c1", "up generate")

    state = go(world, state, "bulk@1 d1", "news d1")
    assert free_blocks(world, state) < SHARDED.decode_blocks, "one shard has yet to close"
    state = go(world, state, "bulk d1", "news d1")
    assert free_blocks(world, state) == SHARDED.decode_blocks
    assert world.wrong_at_the_end(state, faults=1)[1] == []


def ends_without_the_stream_of_a_shard(world: World) -> list[str]:
    """What is wrong at the end when the stream to the second shard breaks as it is opened."""
    state = world.root()
    lost = "lose transfer:p1>d1:100/t1#1/1/1@1"
    while lost not in map(world.label, world.faults(state)):
        state, _ = world.after(state, world.moves(state)[0])
    return [wrong.text for wrong in world.wrong_at_the_end(go(world, state, lost), faults=1)[1]]


def test_the_stream_of_any_shard_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that would find this by itself is longer than a test may take."""
    assert ends_without_the_stream_of_a_shard(World(SHARDED)) == []

    def first_alone(self: Handover, key: Any, strand: int, now: float) -> None:
        if strand == 0:
            reopen(self, key, strand, now)

    reopen = Handover.reopen
    monkeypatch.setattr(Handover, "reopen", first_alone)
    assert ends_without_the_stream_of_a_shard(World(SHARDED)) == ["c1: DECODE_LOST"]
