"""A fault injector for gRPC calls: rules that say which message of which call is dropped, delayed,
duplicated, half-closed or corrupted.

    injector = Injector(seed=7)
    injector.add(Rule(Kind.DROP, "SendFirstToken", probability=0.1))
    server = await start_prefill(config, engine, interceptors=injected(injector))

This module decides, and holds no socket and no clock. `faults_client`, `faults_futures` and
`faults_server` carry the decisions out as interceptors; `faults_wiring` hands them out.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial


class Kind(enum.Enum):
    """What happens to a message."""

    DROP = "drop"
    """It never arrives. Later messages of a stream do; a unary call lasts until its deadline."""
    DELAY = "delay"
    """It arrives later, and with it whatever follows it on its stream."""
    DUPLICATE = "duplicate"
    """It arrives twice. A unary request is a call of its own the second time, whose answer nobody
    hears on the client; a server runs its handler again and the second answer counts."""
    HALF_CLOSE = "half_close"
    """Its stream ends before it, as if its sender had nothing more to say."""
    CORRUPT = "corrupt"
    """Its bytes are damaged."""


class Direction(enum.Enum):
    """Which way a message goes."""

    REQUEST = "request"
    RESPONSE = "response"


Damage = Callable[[bytes, random.Random], bytes]
"""Damages a serialized message."""


def flip_bit(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with one bit of them flipped; nothing to flip in an empty message."""
    if not data:
        return data
    damaged = bytearray(data)
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


@dataclass(frozen=True, eq=False)
class Rule:
    """Strikes the messages that fit everything it says.

    `method` is a pattern as `fnmatch` has them for the full name, "/pd_grpc.v1.DecodeService/*", or
    without a slash for the last part of it, "Allocate". `messages` are numbers from 1 of a call's
    messages in their direction, and `calls` numbers from 1 of the calls of one method; None is all.
    `probability` is for each message on its own; after `times` strikes the rule is spent.

    `delay_s` is how long a DELAY holds a message, and how long after it the copy of a DUPLICATE
    comes: seconds, or the ends of a range from which each message takes its own. `damage` is what
    CORRUPT does.

    HALF_CLOSE strikes no unary message, and DUPLICATE no unary response: neither can happen.
    ValueError when it contradicts itself.
    """

    kind: Kind
    method: str = "*"
    direction: Direction = Direction.REQUEST
    messages: Container[int] | None = None
    calls: Container[int] | None = None
    probability: float = 1.0
    times: int | None = None
    delay_s: float | tuple[float, float] = 0.0
    damage: Damage = flip_bit

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability}, not within 0 and 1")
        low, high = self._delays()
        if not 0.0 <= low <= high:
            raise ValueError(f"delay_s is {self.delay_s}: no range of seconds")
        if self.kind is Kind.DELAY and high == 0.0:
            raise ValueError("a DELAY needs delay_s")
        if high and self.kind not in (Kind.DELAY, Kind.DUPLICATE):
            raise ValueError(f"a {self.kind.name} has no delay_s: add a DELAY beside it")

    def of(self, method: str) -> bool:
        """Whether a method's calls may be struck; `method` is the full name."""
        name = method if "/" in self.method else method.rpartition("/")[2]
        return fnmatchcase(name, self.method)

    def delay(self, chance: random.Random) -> float:
        """How long to wait, in seconds."""
        low, high = self._delays()
        return low if low == high else chance.uniform(low, high)

    def _delays(self) -> tuple[float, float]:
        return self.delay_s if isinstance(self.delay_s, tuple) else (self.delay_s, self.delay_s)


@dataclass(frozen=True)
class Fate:
    """What becomes of one message. The delay comes first, then the rest.

    With `dropped` and `duplicated` a unary request arrives once, as a call that its caller's cancel
    does not reach: that is a message which the network held.
    """

    delay_s: float = 0.0
    dropped: bool = False
    duplicated: bool = False
    copy_delay_s: float = 0.0
    half_closed: bool = False
    damages: tuple[Callable[[bytes], bytes], ...] = ()

    def damaged(self, data: bytes) -> bytes:
        """The bytes that arrive."""
        for damage in self.damages:
            data = damage(data)
        return data


WHOLE = Fate()
"""Nothing happens."""


class Injector:
    """Holds the rules and decides by them; safe from any thread.

    Rules may be added and removed at any time, and count for the messages that come after. The same
    seed gives the same faults for the same rules, calls and messages, each numbered in its order.
    Give the two ends of a call an injector each, or every rule strikes twice.
    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._rules: dict[Rule, int] = {}
        self._added = 0
        self._calls: Counter[str] = Counter()
        self._strikes: Counter[Rule] = Counter()
        for rule in rules:
            self.add(rule)

    def add(self, rule: Rule) -> Rule:
        """Have a rule from now on; returns it."""
        with self._lock:
            if rule not in self._rules:
                self._rules[rule] = self._added
                self._added += 1
        return rule

    def remove(self, rule: Rule) -> None:
        """Have a rule no more; what it has held is held to its end."""
        with self._lock:
            self._rules.pop(rule, None)

    def clear(self) -> None:
        """Have no rules."""
        with self._lock:
            self._rules.clear()

    def strikes(self, rule: Rule | None = None) -> int:
        """How many messages a rule has struck, or all rules there ever were."""
        with self._lock:
            return self._strikes.total() if rule is None else self._strikes[rule]

    def begin(self, method: str, streams: Container[Direction] = ()) -> CallFates:
        """A call begins, of a method by its full name; `streams` are the directions in which more
        than one message may go."""
        with self._lock:
            self._calls[method] += 1
            return CallFates(self, method, self._calls[method], streams)

    def fate(self, call: CallFates, direction: Direction, message: int) -> Fate:
        """Decide what becomes of a message; asked once for each."""
        with self._lock:
            struck = [
                (rule, chance)
                for rule, number in self._rules.items()
                if (chance := self._struck(rule, number, call, direction, message)) is not None
            ]
        return _fate_of(struck) if struck else WHOLE

    def _struck(
        self, rule: Rule, number: int, call: CallFates, direction: Direction, message: int
    ) -> random.Random | None:
        """The dice of a strike; None when the message is spared."""
        if (
            rule.direction is not direction
            or not rule.of(call.method)
            or not _possible(rule.kind, direction, direction in call.streams)
            or (rule.messages is not None and message not in rule.messages)
            or (rule.calls is not None and call.number not in rule.calls)
            or (rule.times is not None and self._strikes[rule] >= rule.times)
        ):
            return None
        where = f"{self._seed}/{number}/{call.method}/{call.number}/{direction.value}/{message}"
        chance = random.Random(where)
        if chance.random() >= rule.probability:
            return None
        self._strikes[rule] += 1
        return chance


class CallFates:
    """The fates of one call's messages, in the order in which they are asked for."""

    def __init__(
        self, injector: Injector, method: str, number: int, streams: Container[Direction]
    ) -> None:
        self.method = method
        self.number = number
        """Of the calls of this method, from 1."""
        self.streams = streams
        self._injector = injector
        self._asked: Counter[Direction] = Counter()

    def request(self) -> Fate:
        """The next request's."""
        return self._next(Direction.REQUEST)

    def response(self) -> Fate:
        """The next response's."""
        return self._next(Direction.RESPONSE)

    def _next(self, direction: Direction) -> Fate:
        self._asked[direction] += 1
        return self._injector.fate(self, direction, self._asked[direction])


def _possible(kind: Kind, direction: Direction, stream: bool) -> bool:
    if kind is Kind.HALF_CLOSE:
        return stream
    return stream or kind is not Kind.DUPLICATE or direction is Direction.REQUEST


def _fate_of(struck: list[tuple[Rule, random.Random]]) -> Fate:
    delay_s = copy_delay_s = 0.0
    damages = []
    kinds = set()
    for rule, chance in struck:
        kinds.add(rule.kind)
        if rule.kind is Kind.DELAY:
            delay_s += rule.delay(chance)
        elif rule.kind is Kind.DUPLICATE:
            copy_delay_s += rule.delay(chance)
        elif rule.kind is Kind.CORRUPT:
            damages.append(partial(_damage, rule.damage, chance))
    return Fate(
        delay_s,
        Kind.DROP in kinds,
        Kind.DUPLICATE in kinds,
        copy_delay_s,
        Kind.HALF_CLOSE in kinds,
        tuple(damages),
    )


def _damage(damage: Damage, chance: random.Random, data: bytes) -> bytes:
    return damage(data, chance)
