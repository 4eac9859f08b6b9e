"""A wire that promises what gRPC promises: order within a call, none between calls.

A call has two queues, one in each direction. A peer that crashes ends its calls, a frozen one is
silent, and so is a call that stalls. Nothing is lost but with its call: a message that the network
loses breaks the call on both sides. The wire is a plain tuple of calls, so that two states of the
world can be compared; whoever changes it gets a new one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message as Proto

from pd_grpc.protocol.faults import Code, Fault, TransportFault, read_status

CANCEL = "cancel"
"""The client has left the call, or is gone."""
CLOSE = "close"
"""The client says nothing more and does not listen."""
CORRUPT = "corrupt"
"""Third part of a chunk that is not what was sent."""
UNPLUGGED = "unplugged"
"""The connection by which memory was lent has ended, and whoever has the memory lives."""
BROKEN = "broken"
"""The connection has gone under the call."""
ANSWER = "answer"
"""The one answer of a unary call, which ends it."""
END = "end"
"""The server has ended the call: with OK when the body is None, else with a fault."""


class CallId(NamedTuple):
    """A call: who makes it to whom, and a name that is never used twice."""

    kind: str
    client: str
    server: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.client}>{self.server}:{self.name}"


@dataclass(frozen=True)
class Message:
    """One message; `body` is not to be changed."""

    kind: str
    body: Any


class Interned:
    """Calls and messages by small numbers, the same content always by the same number."""

    def __init__(self) -> None:
        self.calls: list[CallId] = []
        self.messages: list[Message] = []
        self._call_numbers: dict[CallId, int] = {}
        self._message_numbers: dict[Hashable, int] = {}

    def call(self, kind: str, client: str, server: str, name: str) -> int:
        """The number of a call."""
        call = CallId(kind, client, server, name)
        number = self._call_numbers.get(call)
        if number is None:
            number = self._call_numbers[call] = len(self.calls)
            self.calls.append(call)
        return number

    def message(self, kind: str, body: Any = None) -> int:
        """The number of a message."""
        key = (kind, content_of(body))
        number = self._message_numbers.get(key)
        if number is None:
            number = self._message_numbers[key] = len(self.messages)
            self.messages.append(Message(kind, body))
        return number


def content_of(body: Any) -> Hashable:
    """What makes two bodies the same. The text of a fault is for people and tells nothing."""
    if isinstance(body, Proto):
        return (body.DESCRIPTOR.name, body.SerializeToString(deterministic=True))
    if isinstance(body, Fault):
        metadata = tuple(sorted(body.metadata.items()))
        return (body.reason, body.mapped_code, metadata, body.retry_after_s)
    if isinstance(body, TransportFault):
        return body.code
    if isinstance(body, tuple):
        return tuple(content_of(part) for part in body)
    assert isinstance(body, bytes | str | int | float | None)
    return body


def as_sent(fault: Fault | None) -> Fault | TransportFault | None:
    """A fault as it arrives: through its status."""
    return None if fault is None else read_status(fault.status())


# --- operations ----------------------------------------------------------------------------------


class Op(NamedTuple):
    """What a process does to the wire: `kind` is one of OPEN, UP, DOWN, and the ends above."""

    kind: str
    call: int
    message: int = -1


OPEN = "open"
"""A client begins a call with its first message."""
UP = "up"
"""A client says more."""
DOWN = "down"
"""A server says something."""

POST = "post"
"""Something is put into a queue for a server, and not heard of again."""

WATCH = "watch"
"""A client begins a call that waits for its server to be there."""

WRITE = "write"
"""A client writes into the memory that a server has lent it by this call; nothing is on its way."""

LEND = "lend"
"""The kind of the calls by which that is lent. Their server hears of the end of the client's
process however they have ended: it has a pidfd."""

OPENED, STALLED, DEAF, GHOST, CUT, POSTED, WAITS, APART = 1, 2, 4, 8, 16, 32, 64, 128
"""Flags of a call: the server has heard of it; nothing of it is delivered for now; the client does
not listen; it repeats another call, which nobody waits for and which outlives its server; its
connection is gone, and only the news of that arrives; it lies in a queue until its server reads
it; it waits until its server is there; its connection is gone, and its server watches the client
all the same."""


class Line(NamedTuple):
    """A call on the wire: what is on its way up to the server and down to the client."""

    call: int
    up: tuple[int, ...]
    down: tuple[int, ...]
    flags: int


Wire: TypeAlias = tuple[Line, ...]


def only_tells(message: Message) -> bool:
    """Whether a message asks for nothing and decides nothing, so that it matters little when it
    comes: progress, a chunk of KV and its acknowledgement, a heartbeat's."""
    if message.kind == "chunk":
        return True
    if not isinstance(message.body, Proto):
        return False
    if message.kind == "prefill" and "event" in message.body.DESCRIPTOR.oneofs_by_name:
        return message.body.WhichOneof("event") in ("queued", "progress")
    if message.kind in ("transfer", "session"):
        return message.body.WhichOneof("message") in ("ack", "opened", "heartbeat_ack", "load")
    return False


class WireRules:
    """What becomes of a wire; `ids` knows the calls and messages on it."""

    def __init__(self, ids: Interned) -> None:
        self.ids = ids
        self.cancel = ids.message(CANCEL)
        self.close = ids.message(CLOSE)
        gone = TransportFault(Code.UNAVAILABLE, "the connection has gone")
        self.broken = ids.message(BROKEN, gone)
        self.unplugged = ids.message(UNPLUGGED)
        self._ends = frozenset({END, BROKEN, ANSWER})

    def perform(self, wire: Wire, ops: tuple[Op, ...]) -> Wire:
        """Carry a process's operations out, in order."""
        if not ops:
            return wire
        lines = {line.call: line for line in wire}
        for kind, call, message in ops:
            if kind == WRITE:
                continue
            if kind == OPEN:
                assert call not in lines, f"{self.ids.calls[call]} is opened twice"
                lines[call] = Line(call, (message,), (), 0)
                continue
            if kind == WATCH:
                lines[call] = Line(call, (message,), (), WAITS)
                continue
            if kind == POST:
                lines[call] = Line(call, (message,), (), DEAF | GHOST | POSTED)
                continue
            line = lines.get(call)
            if line is None:
                continue  # It has ended meanwhile.
            changed = self._changed(line, kind, message)
            if changed is None:
                del lines[call]
            else:
                lines[call] = changed
        return tuple(sorted(lines.values()))

    def _changed(self, line: Line, kind: str, message: int) -> Line | None:
        call, up, down, flags = line
        if flags & APART:
            return line
        if kind == UP:
            return line if flags & CUT else Line(call, (*up, message), down, flags)
        if kind in (DOWN, END):
            if flags & DEAF and self.ids.messages[message].kind in self._ends:
                return None
            return line if flags & (DEAF | CUT) else Line(call, up, (*down, message), flags)
        if flags & CUT:
            return Line(call, up, (), flags | DEAF) if up else None
        left = self.close if kind == CLOSE else self.cancel
        return Line(call, (*up, left), (), flags | DEAF)

    def delivered(self, wire: Wire, call: int, up: bool) -> tuple[Wire, int]:
        """The wire without the first message of a queue, and that message."""
        rest = []
        found = -1
        for line in wire:
            if line.call != call:
                rest.append(line)
                continue
            found = line.up[0] if up else line.down[0]
            kept = self._without_first(line, up, self.ids.messages[found].kind)
            if kept is not None:
                rest.append(kept)
        return tuple(rest), found

    def _without_first(self, line: Line, up: bool, kind: str) -> Line | None:
        call, ups, downs, flags = line
        if up:
            if kind not in (CANCEL, CLOSE):
                return Line(call, ups[1:], downs, flags | OPENED)
            return Line(call, (), downs, flags & ~OPENED) if downs else None
        if kind not in self._ends:
            return Line(call, ups, downs[1:], flags)
        if flags & APART:
            return Line(call, ups, (), flags | DEAF)
        # The server has yet to hear that the connection is gone.
        return Line(call, ups, (), flags | DEAF) if flags & CUT and ups else None

    def refused(self, wire: Wire, call: int) -> Wire:
        """A call meets no process: its client hears that the connection is gone."""
        return tuple(
            line if line.call != call else Line(call, (), (self.broken,), CUT)
            for line in wire
            if line.call != call or not line.flags & DEAF
        )

    def crashed(self, wire: Wire, process: str, keep: bool) -> Wire:
        """A process is gone. `keep` says whether what it had sent, and what others had sent with
        its calls, still arrives."""
        lines = [self._orphaned(line, process, keep) for line in wire]
        return tuple(line for line in lines if line is not None)

    def _orphaned(self, line: Line, process: str, keep: bool) -> Line | None:
        call, up, down, flags = line
        who = self.ids.calls[call]
        if who.server == process:
            if flags & GHOST and not flags & OPENED:
                return line
            if flags & WAITS and not flags & OPENED:
                return line
            if flags & DEAF:
                return None
            told = down if keep else ()
            if not told or self.ids.messages[told[-1]].kind not in self._ends:
                told = (*told, self.broken)
            return Line(call, (), told, flags & STALLED | CUT)
        if who.client != process or flags & GHOST:
            return line
        sent = up if keep else ()
        if flags & APART:
            return Line(call, (*sent, self.cancel), (), flags | DEAF)
        if flags & DEAF and sent:
            return line  # Its own end is on its way.
        if not flags & OPENED and not sent:
            return None
        return Line(call, (*sent, self.cancel), (), flags | DEAF)

    def lost(self, wire: Wire, call: int) -> Wire:
        """What is on its way in a call is lost, and with it the call."""
        lines = [line if line.call != call else self._cut(line) for line in wire]
        return tuple(line for line in lines if line is not None)

    def _cut(self, line: Line) -> Line | None:
        call, _, _, flags = line
        if self.ids.calls[call].kind == LEND and flags & OPENED:
            return Line(call, (self.unplugged,), (self.broken,), flags | APART)
        up = (self.cancel,) if flags & OPENED else ()
        down = () if flags & DEAF else (self.broken,)
        return Line(call, up, down, flags | CUT) if up or down else None

    def repeated(self, wire: Wire, call: int) -> Wire:
        """The request of a unary call goes out once more; nobody hears the second answer."""
        who = self.ids.calls[call]
        (line,) = (line for line in wire if line.call == call)
        there = {line.call for line in wire}
        name = who.name
        ghost = call
        while ghost in there:
            name += "~"
            ghost = self.ids.call(who.kind, who.client, who.server, name)
        return tuple(sorted((*wire, Line(ghost, line.up[:1], (), DEAF | GHOST))))

    def corrupted(self, wire: Wire, call: int) -> Wire:
        """A bit of the chunk that is next in a call turns on its way, unseen by the transport."""
        return tuple(
            line
            if line.call != call
            else line._replace(up=(self._with_another_bit(line.up[0]), *line.up[1:]))
            for line in wire
        )

    def _with_another_bit(self, chunk: int) -> int:
        header, payload = self.ids.messages[chunk].body
        return self.ids.message("chunk", (header, bytes([payload[0] ^ 1]) + payload[1:], CORRUPT))

    def stalled(self, wire: Wire, call: int, stalled: bool) -> Wire:
        """Nothing of a call is delivered any more, or all of it again."""
        return tuple(
            line
            if line.call != call
            else line._replace(flags=line.flags | STALLED if stalled else line.flags & ~STALLED)
            for line in wire
        )
