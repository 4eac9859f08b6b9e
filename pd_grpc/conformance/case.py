"""A case: one rule of the protocol, and what shows whether an implementation keeps it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

T = TypeVar("T")
S = TypeVar("S")

_answer_s: ContextVar[float] = ContextVar("answer_s", default=5.0)


def answer_s() -> float:
    """How long anything may take that the protocol gives no time of its own."""
    return _answer_s.get()


def answers_within(seconds: float) -> None:
    """Set how long that is, for what runs in this context from now on."""
    _answer_s.set(seconds)


def quiet_s() -> float:
    """How long to listen for what must not come, where the protocol gives no time: it would come at
    once."""
    return min(0.2, answer_s() / 5)


def soon_s() -> float:
    """A budget or a wait that is to be over soon, yet not before the subject has answered."""
    return max(0.4, answer_s() / 10)


class Broken(Exception):
    """A rule was not kept: says what should have happened, and what did."""


class NotApplicable(Exception):
    """The subject lacks what the case is about, as it may; says what."""


@dataclass(frozen=True)
class Case(Generic[S]):
    """One numbered case. `run` raises Broken where the subject breaks the rule."""

    id: str
    rule: str
    """The promise, word for word as docs/protocol.md has it."""
    title: str
    """What is done to see whether it is kept, in a line."""
    run: Callable[[S], Awaitable[None]]


class Cases(Generic[S]):
    """The cases for one role, in the order of their numbers."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._by_id: dict[str, Case[S]] = {}

    def __call__(
        self, number: int, rule: str
    ) -> Callable[[Callable[[S], Awaitable[None]]], Callable[[S], Awaitable[None]]]:
        """Register a coroutine function as case `number`; its docstring, one sentence, says what it
        does. ValueError when the number is taken."""
        case_id = f"{self._prefix}{number:03d}"

        def register(run: Callable[[S], Awaitable[None]]) -> Callable[[S], Awaitable[None]]:
            if case_id in self._by_id:
                raise ValueError(f"{case_id} is taken by {self._by_id[case_id].run.__name__}")
            title = " ".join((run.__doc__ or "").split())
            self._by_id[case_id] = Case(case_id, " ".join(rule.split()), title, run)
            return run

        return register

    def __iter__(self) -> Iterator[Case[S]]:
        return iter(sorted(self._by_id.values(), key=lambda case: case.id))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, case_id: str) -> bool:
        return case_id in self._by_id

    def __getitem__(self, case_id: str) -> Case[S]:
        return self._by_id[case_id]


def broken(expected: str, seen: object) -> NoReturn:
    """The rule was not kept."""
    raise Broken(f"expected {expected}; got {show(seen)}")


def expect(condition: bool, expected: str, seen: object) -> None:
    """Broken, with what was seen, unless the condition holds."""
    if not condition:
        broken(expected, seen)


def expect_equal(seen: object, wanted: object, what: str) -> None:
    """Broken unless `seen` is what was wanted."""
    expect(seen == wanted, f"{what} {show(wanted)}", seen)


def parsed(parse: Callable[[S], T], sent: S, what: str) -> T:
    """What the subject sent, as the kit's own code reads it. Broken where it cannot be read."""
    try:
        return parse(sent)
    except (ValueError, LookupError, DecodeError) as error:
        broken(f"{what} that can be used", f"{show(sent)}: {error}")


async def within(seconds: float | None, awaitable: Awaitable[T], what: str) -> T:
    """The result of an awaitable. Broken when `what` has not come in time; None is `answer_s`."""
    seconds = answer_s() if seconds is None else seconds
    try:
        return await asyncio.wait_for(asyncio.ensure_future(awaitable), seconds)
    except asyncio.TimeoutError:
        raise Broken(f"expected {what} within {seconds:g} s; nothing came") from None


LOOK_AGAIN_S = 0.01
"""Between two looks at what changes by itself."""


async def eventually(
    look: Callable[[], Awaitable[T]],
    right: Callable[[T], bool],
    what: str,
    seconds: float | None = None,
) -> T:
    """Look again and again until what is seen is right, and return it. Broken, with what was seen
    last, when it has not become so in time; None is `answer_s`."""
    until = time.monotonic() + (answer_s() if seconds is None else seconds)
    while not right(seen := await look()):
        expect(time.monotonic() < until, what, seen)
        await asyncio.sleep(LOOK_AGAIN_S)
    return seen


def show(value: object) -> str:
    """A value as an explanation has it: messages in protobuf's text form, in one line."""
    if isinstance(value, Message):
        return f"{value.DESCRIPTOR.name} {{ {message_text(value)} }}"
    if isinstance(value, str | Exception):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(show(item) for item in value)}]"
    return repr(value)


_SHOWN_BYTES = 16
_SHOWN_CHARS = 160
_SHOWN_ITEMS = 12


def message_text(message: Message) -> str:
    """A message in one line, its long fields cut."""
    return text_format.MessageToString(_cut(message), as_one_line=True)


def _cut(message: Message) -> Message:
    """A copy that a person wants to read."""
    shown: Any = type(message)()
    shown.CopyFrom(message)
    for field, value in shown.ListFields():
        if field.is_repeated:
            if not hasattr(value, "items") and len(value) > _SHOWN_ITEMS:
                del value[_SHOWN_ITEMS:]
        elif field.type == field.TYPE_BYTES and len(value) > _SHOWN_BYTES:
            setattr(shown, field.name, value[:_SHOWN_BYTES])
        elif field.type == field.TYPE_STRING and len(value) > _SHOWN_CHARS:
            setattr(shown, field.name, value[:_SHOWN_CHARS] + "…")
        elif field.type == field.TYPE_MESSAGE:
            value.CopyFrom(_cut(value))
    return shown  # type: ignore[no-any-return]
