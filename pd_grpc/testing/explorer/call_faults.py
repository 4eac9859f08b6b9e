"""What can go wrong with one call on the wire."""

from __future__ import annotations

from collections.abc import Iterator

from pd_grpc.testing.explorer.wire import (
    APART,
    DEAF,
    GHOST,
    LEND,
    OPENED,
    POSTED,
    STALLED,
    WAITS,
    Interned,
    Line,
)

UNARY = frozenset({"allocate", "first", "release"})


def call_faults(ids: Interned, line: Line, kinds: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Of these kinds, those that can happen to a call now."""
    who = ids.calls[line.call]
    if line.flags & WAITS and not line.flags & OPENED:
        return
    if who.kind == LEND:
        if "lose" in kinds and line.flags & OPENED and not line.flags & (APART | DEAF):
            yield ("lose", line.call)
        return
    if "lose" in kinds and (line.flags & POSTED or not line.flags & GHOST):
        yield ("lose", line.call)
    if "stall" in kinds and not line.flags & STALLED and (line.up or line.down):
        yield ("stall", line.call)
    if "corrupt" in kinds and line.up and _is_sound_chunk(ids, line.up[0]):
        yield ("corrupt", line.call)
    again = who.kind in UNARY and not who.name.endswith("~") and bool(line.up)
    if "repeat" in kinds and again and ids.messages[line.up[0]].kind == who.kind:
        yield ("repeat", line.call)


def _is_sound_chunk(ids: Interned, number: int) -> bool:
    """Whether it is a chunk that carries bytes, as they were sent."""
    message = ids.messages[number]
    return message.kind == "chunk" and len(message.body) == 2 and bool(message.body[1])
