"""The explorer finds nothing wrong with P, D and the router, and walks the same way twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.prefill.shard_silence import ShardSilence
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explore import explore, replay, walk
from pd_grpc.testing.explorer.client_process import ClientProcess
from pd_grpc.testing.explorer.decode_process import DecodeProcess
from pd_grpc.testing.explorer.prefill_process import PrefillProcess
from pd_grpc.testing.explorer.report import Report
from pd_grpc.testing.explorer.scenario import (
    ALIKE,
    DIRECT,
    FULL,
    LENT_ONE,
    ONE_DECODE,
    ONE_SIDED,
    RECOVERY,
    SMALL,
    TWO_DECODES,
    Scenario,
)
from pd_grpc.testing.explorer.walks import NoSuchMove
from pd_grpc.testing.explorer.world import State, World

pytestmark = pytest.mark.longest


def is_clean(report: Report) -> None:
    assert not report.found, "\n".join(report.lines())


def test_one_request_goes_well_in_every_order_without_a_fault() -> None:
    report = explore(states=200_000, scenarios=[SMALL], most_faults=0)

    is_clean(report)
    (searched,) = report.searches
    assert [layer.whole for layer in searched.layers] == [True]
    assert report.states > 10_000


@pytest.mark.parametrize(
    "scenario",
    [SMALL, DIRECT, ONE_DECODE, TWO_DECODES, ALIKE, FULL[0], *RECOVERY, LENT_ONE, *ONE_SIDED],
)
def test_nothing_goes_wrong_in_a_short_search_with_faults(scenario: Scenario) -> None:
    report = explore(states=8_000, scenarios=[scenario], most_faults=2)

    is_clean(report)
    assert report.states >= 8_000


def test_prompts_that_begin_alike_are_served_from_what_is_kept() -> None:
    """By P, by D and by both, on walks on which neither is lost with its cache."""
    scenario = replace(ALIKE, faults=("lose", "repeat", "stall", "corrupt", "leave"))
    found = set()
    for seed in range(40):
        walked = walk(scenario, seed)
        assert not walked.found, walked
        world, state, _ = replay(scenario, walked.moves)
        p, d = world.process(state, "p1"), world.process(state, "d1")
        assert isinstance(p, PrefillProcess) and isinstance(d, DecodeProcess)
        caches = {"p": p.machine.cache, "d": d.machine.ledger.cache}
        found |= {name for name, cache in caches.items() if cache.found_blocks}
    assert found == {"p", "d"}


def test_nothing_goes_wrong_on_random_walks() -> None:
    report = explore(states=0, walks=120, seed=1)

    is_clean(report)
    assert report.walk_faults > 120
    assert report.walk_moves > 120 * 20


def results_of(scenario: Scenario, fault: str) -> set[str]:
    """How c1's request ends on walks on which only this can go wrong, and does."""
    results = set()
    for seed in range(60):
        walked = walk(replace(scenario, faults=(fault,)), seed, most_faults=1)
        assert not walked.found, walked
        if walked.faults:
            world, state, _ = replay(replace(scenario, faults=(fault,)), walked.moves)
            results.add(client(world, state).result)
    return results


def client(world: World, state: State) -> ClientProcess:
    process = world.process(state, "c1")
    assert isinstance(process, ClientProcess)
    return process


def test_a_corrupt_chunk_ends_the_request_and_is_never_a_token() -> None:
    assert results_of(SMALL, "corrupt") == {Reason.KV_CORRUPT.name}


def test_a_fault_on_the_way_is_made_good_elsewhere() -> None:
    """With two of each, whatever happens to one request's calls and instances."""
    for fault in ("lose", "crash", "corrupt", "drain"):
        assert results_of(RECOVERY[0], fault) == {"ok"}, fault


def test_a_whole_answer_is_not_lost_with_the_last_word_of_it() -> None:
    world = World(RECOVERY[0])
    state = world.root()
    while len(client(world, state).tokens) < RECOVERY[0].max_tokens:
        state, _ = world.after(state, world.moves(state)[0])
    (lost,) = (m for m in world.faults(state) if world.label(m).startswith("lose generate"))
    state, _ = world.after(state, lost)

    assert client(world, state).result == ""
    assert world.wrong_at_the_end(state, faults=1)[1] == []


def test_a_drain_refuses_or_lets_finish() -> None:
    results = results_of(SMALL, "drain")

    # D has left where P was about to ask it.
    assert results - {Reason.DECODE_LOST.name} == {"ok", Reason.DRAINING.name}


def test_p_hears_of_a_shard_that_is_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[TransferKey] = []
    right = ShardSilence.reached

    def noted(self: ShardSilence, key: TransferKey, strand: int) -> None:
        heard.append(key)
        right(self, key, strand)

    monkeypatch.setattr(ShardSilence, "reached", noted)
    for seed in range(60):
        walked = walk(replace(SMALL, faults=("lose",)), seed)
        assert not walked.found, walked
    assert heard


def test_a_request_that_comes_three_times_is_answered_once() -> None:
    scenario = replace(SMALL, faults=("repeat",))
    world = World(scenario)
    state = world.root()
    while not world.faults(state):
        state, _ = world.after(state, world.moves(state)[0])
    for _ in range(2):
        state, _ = world.after(state, world.faults(state)[0])
    calls = [line.call for line in world.wire(state)]

    assert len(calls) == len(set(calls))
    assert [world.ids.calls[call].name for call in calls][-3:] == [
        "100/t1#1/1",
        "100/t1#1/1~",
        "100/t1#1/1~~",
    ]
    assert world.wrong_at_the_end(state, faults=2)[1] == []


def test_a_seed_walks_the_same_way_every_time() -> None:
    first, second = (walk(FULL[1], 11) for _ in range(2))

    assert first == second
    assert first.moves != walk(FULL[1], 12).moves


def test_the_moves_of_a_walk_can_be_made_again() -> None:
    walked = walk(TWO_DECODES, 4)

    world, state, wrong = replay(TWO_DECODES, walked.moves)

    assert not wrong
    assert world.settled(state)


def test_a_move_that_cannot_be_made_is_named() -> None:
    with pytest.raises(NoSuchMove, match="move 0, 'thaw p1'"):
        replay(SMALL, ["thaw p1"])
