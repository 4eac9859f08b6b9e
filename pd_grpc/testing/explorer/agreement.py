"""What everybody must know once nothing is on its way: failure travels in one round trip.

Checked in quiet: every message has been delivered, nobody has a step to take, and time has yet to
pass. Whoever waits then for what another has given up would have to learn it from a timeout. What a
frozen process, a process that is down or a call that stalls does not say is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pd_grpc.testing.explorer.process import Violation
from pd_grpc.testing.explorer.wire import CUT, DEAF, GHOST, STALLED

if TYPE_CHECKING:
    from pd_grpc.testing.explorer.world import State, World

ROUND_TRIP = "failure travels in one round trip"
OWN_ONLY = "a bad instance delays only its own"

_ANSWERED = ("prefill", "generate", "allocate")


def disagreements(world: World, state: State) -> list[Violation]:
    """What somebody in a quiet state does not know."""
    wire = world.wire(state)
    found = [Violation(OWN_ONLY, text) for text in _delayed(world, state)]
    if any(line.flags & STALLED for line in wire):
        return found
    facts = {
        name: world.locals.all[state[i]].looks.facts
        for i, name in enumerate(world.names)
        if world.runs(state, i)
    }
    texts = [
        *_calls(world, state, facts),
        *_prefills(facts),
        *_decodes(facts),
        *_served(world, state, facts),
        *_clients(facts),
        *_writers(world, state, facts),
    ]
    return found + [Violation(ROUND_TRIP, text) for text in texts]


def _calls(world: World, state: State, facts: dict[str, Any]) -> Iterator[str]:
    """A call is known at both of its ends, or at neither."""
    open_calls = {line.call: line for line in world.wire(state)}
    for line in open_calls.values():
        who = world.ids.calls[line.call]
        on_its_way = line.up or line.down  # to somebody who is frozen
        if on_its_way or line.flags & (DEAF | CUT | GHOST) or who.kind not in _ANSWERED:
            continue
        if who.server in facts and line.call not in facts[who.server][-1]:
            yield f"{who.server}: it does not know {who.kind} of {who.client}"
    for name, known in facts.items():
        for call in known[-1]:
            kind = world.ids.calls[call].kind
            if call not in open_calls and world.ids.calls[call].name[-1] != "~":
                yield f"{name}: it serves or awaits a {kind} that has ended"


def _prefills(facts: dict[str, Any]) -> Iterator[str]:
    for name, known in facts.items():
        if name[0] != "p":
            continue
        for key, call, server, epoch, asking, talks in known[0]:
            if call not in known[-1]:
                yield f"{name}: it goes on with {key}, whose caller has left"
            there = facts.get(server) if talks else None
            if there is None or key in {transfer[0] for transfer in there[1]}:
                continue
            if asking or there[0] == epoch:
                yield f"{name}: it goes on with {key}, which {server} has ended"


def _decodes(facts: dict[str, Any]) -> Iterator[str]:
    for name, known in facts.items():
        if name[0] != "d":
            continue
        for key, state, owner, _, handed_off, _ in known[1]:
            if owner is None or handed_off or owner[0] not in facts:
                continue
            epoch, flying, owed, _ = _of_prefill(facts[owner[0]])
            here = any(f[0] == key and f[2] == name for f in flying)
            if epoch == owner[1] and not here and (name, key) not in owed:
                yield f"{name}: it keeps {key} as {state}, which {owner[0]} has ended"


def _served(world: World, state: State, facts: dict[str, Any]) -> Iterator[str]:
    """A D keeps a transfer for a client only while the client is there and wants it."""
    open_calls = {line.call for line in world.wire(state)}
    for name, known in facts.items():
        if name[0] != "d":
            continue
        served = {transfer[3] for transfer in known[1]}
        for call in known[2] - served:
            who = world.ids.calls[call]
            expected = facts.get(who.client) if who.kind == "generate" else None
            if expected is not None and not _prefills_for(facts, expected[0]):
                yield f"{name}: {who.client} waits here, and nobody has anything for it"
        for key, _, _, call, _, _ in known[1]:
            if call is None:
                continue
            client = world.ids.calls[call].client
            if call not in open_calls or (client in facts and facts[client][1]):
                yield f"{name}: it keeps {key} for a client who has left or was answered"


def _prefills_for(facts: dict[str, Any], key: Any) -> bool:
    """Whether a P that can be asked, or that cannot, has yet to end a transfer."""
    return any(f[0] == key for name, known in facts.items() if name[0] == "p" for f in known[0])


def _of_prefill(known: Any) -> tuple[int, Any, Any, Any]:
    flying, owed, epoch, calls = known
    return epoch, flying, owed, calls


def _clients(facts: dict[str, Any]) -> Iterator[str]:
    for name, known in facts.items():
        if name[0] == "c" and not known[1] and not known[4] and not known[5]:
            yield f"{name}: its client waits, and nobody works for it"


def _writers(world: World, state: State, facts: dict[str, Any]) -> Iterator[str]:
    """A D keeps blocks for a P that may write to them, that does not know of the end, or that has
    no way to say so."""
    prefills = {
        (world.known_as(name), known[2]): (name, known)
        for name, known in facts.items()
        if name[0] == "p" and not world.hangs(state, world.names.index(name))
    }
    for i, server in enumerate(world.names):
        looks = world.looks(state, i)
        for key, name, epoch in frozenset() if looks is None else looks.awaited:
            if (name, epoch) not in prefills or server not in facts:
                continue
            writer, (flying, owed, *_) = prefills[name, epoch]
            if (server, key) not in owed and key not in {flown[0] for flown in flying}:
                yield f"{server}: it keeps the blocks of {key} for {writer}, which writes no more"


def _delayed(world: World, state: State) -> Iterator[str]:
    """A request whose instances no fault has touched is answered without a wait, unless another
    has blocks of its D that is somebody else's than D's."""
    touched = state[-1]
    for route in world.routes:
        looks, there = world.looks(state, route.client), world.looks(state, route.decode)
        if touched & route.first or looks is None or there is None:
            continue
        key, result, *rest = looks.facts
        others = [transfer for transfer in there.facts[1] if transfer[0] != key]
        if all(map(_is_decodes, others)) and not there.quarantined and result != "ok":
            name = world.names[route.client]
            yield f"{name}: no fault has touched its instances, and it is {[result, *rest]}"


def _is_decodes(transfer: Any) -> bool:
    """Whether D needs nobody to go on with a transfer."""
    _, _, _, call, handed_off, local = transfer
    return local or (handed_off and call is not None)
