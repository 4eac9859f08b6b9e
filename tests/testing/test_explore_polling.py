"""The explorer says by itself what broke in public in a system that polls, and of ours it does not.

The processes of `polling` encode the published flows of FastDeploy; the cases are those of the same
names that P and D are tried under.
"""

from __future__ import annotations

from dataclasses import replace

from pd_grpc.testing.explorer.agreement import ROUND_TRIP
from pd_grpc.testing.explorer.scenario import POLLING
from pd_grpc.testing.explorer.search import Found, Search
from pd_grpc.testing.explorer.walks import replay
from pd_grpc.testing.explorer.world import World


def found_with(*faults: str, budget_s: float = 20.0) -> list[Found]:
    """What a search with at most one of these faults finds; clients wait for `budget_s`."""
    world = World(replace(POLLING, faults=faults, budget_s=budget_s))
    return Search(world, 1 if faults else 0).run(20_000, 30).found


def told(found: list[Found], invariant: str, text: str) -> Found:
    """The violation that says this."""
    first = [f for f in found if f.invariant == invariant and text in f.text][:1]
    assert first, [f"{f.invariant}: {f.text}" for f in found]
    return first[0]


def test_s10_a_first_token_that_is_lost_leaves_the_client_without_an_error() -> None:
    found = told(found_with("lose"), ROUND_TRIP, "waits here, and nobody has anything for it")

    assert any(move.startswith("lose done:") for move in found.moves)


def test_s14_kv_meant_for_a_dead_d_is_taken_by_the_one_in_its_place() -> None:
    found = told(found_with("crash"), "no token from unverified KV", "reads Tag(")

    assert "restart d1" in found.moves


def test_f44_no_blocks_never_comes_back_to_p() -> None:
    found = told(found_with(), ROUND_TRIP, "it goes on with t1#1, which d1 has ended")

    assert found.faults == 0


def test_f46_who_waits_for_blocks_does_not_hear_that_its_client_has_left() -> None:
    awaited = "p1: it serves or awaits a prefill that has ended"

    left = told(found_with("leave", budget_s=100.0), ROUND_TRIP, awaited)
    assert "leave c1" in left.moves
    # Nor that its time is over: P's own began afresh.
    late = told(found_with(), ROUND_TRIP, awaited)
    assert late.faults == 0 and "tick c1" in late.moves


def test_what_was_found_can_be_played_again() -> None:
    found = told(found_with("crash"), "no token from unverified KV", "reads Tag(")

    _, _, wrong = replay(replace(POLLING, faults=("crash",)), found.moves)

    assert (found.invariant, found.text) in wrong
