"""What a client is promised, checked once everything is over.

A stream, first token or release between P and D that breaks once is sent again, and costs nobody an
answer. What goes wrong with one request, or with instances that another does not use, costs the
other no answer. Where routers try elsewhere, one fault never costs an answer while a pair is there
that it has not touched, but where the status table says that no other try helps: the time is over,
or the engine has raised. And an attempt fails by a fault of its own: what is late of an earlier one
harms none that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pd_grpc.protocol.faults import Reason
from pd_grpc.testing.explorer.process import Violation

if TYPE_CHECKING:
    from pd_grpc.testing.explorer.world import State, World

ELSEWHERE = "one fault costs no answer"
OWN_FAULT = "each attempt that fails has a fault of its own"

UNHARMED = "no neighbour is harmed"

_WAITED = (Reason.NO_BLOCKS.name, Reason.QUEUE_FULL.name, Reason.STAGE_DEADLINE.name)

MENDED = "a call that breaks between P and D is made again"

SILENT, RAISED, LASTING, GRAVE = 1 << 16, 1 << 17, 1 << 18, 1 << 19
"""Among those that a fault has touched: somebody was silent for a while, an engine has raised, and
a silence was one that several attempts may meet; and something was more than a call between P and D
that broke, or came twice."""

MENDABLE = frozenset({"transfer", "first", "release"})
"""Calls that are made again when they break."""


def broken_promises(world: World, state: State, faults: int) -> list[Violation]:
    """What a client of a state in which everything is over was promised, and has not."""
    if world.scenario.polling or world.scenario.direct:
        return []
    if world.scenario.recovery:
        found = list(_broken(world, state, faults))
    else:
        found = list(_harmed(world, state))
    return found + list(_unmended(world, state, faults))


def _harmed(world: World, state: State) -> Iterator[Violation]:
    """A request fails by a fault of its own instances alone. What it may suffer of others is that
    it waits for blocks that they have."""
    for route in world.routes:
        looks = world.looks(state, route.client)
        assert looks is not None
        result = looks.facts[1]
        if not state[-1] & route.all and result not in ("ok", *_WAITED):
            yield Violation(UNHARMED, f"{world.names[route.client]}: {result}")


def _unmended(world: World, state: State, faults: int) -> Iterator[Violation]:
    if faults > 1 or state[-1] & GRAVE:
        return
    for i in range(world.scenario.first_client, len(world.names)):
        looks = world.looks(state, i)
        assert looks is not None
        result = looks.facts[1]
        if result != "ok":
            yield Violation(MENDED, f"{world.names[i]}: {result}")


def _broken(world: World, state: State, faults: int) -> Iterator[Violation]:
    touched, scenario = state[-1], world.scenario
    prefills = range(scenario.prefills)
    decodes = range(scenario.prefills, scenario.first_client)
    roles = [role for role in (prefills, decodes) if role]
    pair_left = all(any(not touched >> i & 1 for i in role) for role in roles)
    for i in range(scenario.first_client, len(world.names)):
        looks = world.looks(state, i)
        assert looks is not None
        key, result, *_ = looks.facts
        if result == "left":
            continue
        again = bool(touched & LASTING) and not (pair_left and faults <= 1)
        if key.attempt > faults + 1 and not again:
            text = f"{world.names[i]}: {faults} faults, and it is at attempt {key.attempt}"
            yield Violation(OWN_FAULT, text)
        excused = _is_excused(result, touched)
        if result != "ok" and faults <= 1 and pair_left and not excused:
            yield Violation(ELSEWHERE, f"{world.names[i]}: {result}, and a pair was left")


def _is_excused(result: str, touched: int) -> bool:
    if result == Reason.STAGE_DEADLINE.name:
        return bool(touched & SILENT)
    return result == Reason.ENGINE_ERROR.name and bool(touched & RAISED)
