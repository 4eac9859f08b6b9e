"""What two states of a process must have in common to be the same.

The digest walks over everything an object holds. Moments count by how far away they are, blocks by
the order in which they are met, sets in a fixed order; what is only for people and for metrics does
not count. Whatever is not named here counts, so that a new field makes more states and never hides
one.
"""

from __future__ import annotations

import enum
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any

from google.protobuf.message import Message as Proto
from pydantic import BaseModel

from pd_grpc.blocks.pool import BlockPool, Holding
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode.sessions import Offer
from pd_grpc.decode.transfer import Ended
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.serving_times import ServingTimesByPeer
from pd_grpc.protocol.timers import Timers
from pd_grpc.protocol.tombstones import Remembered, Tombstones
from pd_grpc.router.machine import RoutedRequest
from pd_grpc.router.recovery import RecoveringRequest
from pd_grpc.testing.explorer.kv import TagMemory
from pd_grpc.testing.explorer.wire import Interned

EPOCH_OF_TIME = 1e6
"""Every clock starts here, so that a moment can be told from a number of seconds."""

_FOR_PEOPLE = frozenset(
    {
        "late_events",
        "ended_by_state",
        "counts",
        "times",
        "since",
        "state_since",
        "created",
        "prompt_digest",
        "computed_from",
        "asked_blocks",
        "found_blocks",
        "granted_at",
    }
)
_SET_ANEW = frozenset({"now"})
"""The ledger's time is that of the event that it takes in."""
_COUNTERS = frozenset({"_sequence", "_steps", "_step", "_arrivals", "_numbers", "step"})
"""They grow, and only whether two of them are equal matters, which a walk over one state shows."""

_LEFT_OUT = _FOR_PEOPLE | _SET_ANEW | _COUNTERS

# The times of those that were served count from the twentieth on, which no search comes to.
_CONSTANT = (
    BaseModel,
    KvLayout,
    ModelLimits,
    Offer,
    BlockChain,
    ServingTimesByPeer,
    SimTokenizer,
    Random,
    Interned,
)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_BLOCKS = frozenset({"block_table", "blocks", "_blocks"})


def digest_of(root: Any, now: float, as_numbered: bool = False) -> bytes:
    """16 bytes that are the same for states of a process in which the same can happen. Blocks that
    others know by their numbers are told apart by these."""
    walk = _Walk(now, as_numbered)
    walk.visit(root)
    return blake2b("".join(walk.parts).encode(), digest_size=16).digest()


class _Walk:
    def __init__(self, now: float, as_numbered: bool) -> None:
        self._as_numbered = as_numbered
        self.parts: list[str] = []
        self._now = now
        self._seen: dict[int, int] = {}
        self._blocks: dict[int, int] = {}

    def visit(self, value: Any) -> None:
        """Add a value and everything in it."""
        kind = type(value)
        visitor = _VISITORS.get(kind)
        if visitor is None:
            visitor = _VISITORS[kind] = _visitor_of(kind)
        visitor(self, value)

    def plain(self, value: Any) -> None:
        self.parts.append(f"{value!r};")

    def number(self, value: float) -> None:
        if value >= EPOCH_OF_TIME:
            value = round(value - self._now, 6)
            self.parts.append(f"t{value + 0.0:g};")
        else:
            self.parts.append(f"{value!r};")

    def nothing(self, value: Any) -> None:
        pass

    def proto(self, value: Proto) -> None:
        self.parts.append(value.SerializeToString(deterministic=True).hex() + ";")

    def fault(self, value: Fault) -> None:
        self.parts.append(f"F{value.reason.name},{value.mapped_code},{value.retry_after_s};")

    def transport_fault(self, value: TransportFault) -> None:
        self.parts.append(f"F{value.code.name};")

    def sequence(self, value: Any) -> None:
        self.parts.append("[")
        for each in value:
            self.visit(each)
        self.parts.append("]")

    def mapping(self, value: Any) -> None:
        self.parts.append("{")
        for key, each in value.items():
            self.visit(key)
            self.visit(each)
        self.parts.append("}")

    def unordered(self, value: Any) -> None:
        outer, found = self.parts, []
        for each in value:
            self.parts = []
            self.visit(each)
            found.append("".join(self.parts))
        self.parts = outer
        self.parts.append("<" + "".join(sorted(found)) + ">")

    def timers(self, value: Timers[Any]) -> None:
        outer, found = self.parts, []
        for key, at in value._at.items():
            self.parts = []
            self.visit(key)
            self.number(at)
            found.append("".join(self.parts))
        self.parts = outer
        self.parts.append("T" + "".join(sorted(found)) + ";")

    def remembered(self, value: Remembered[Any, Any]) -> None:
        """What is too old is forgotten before anybody asks."""
        for key, (at, record) in value._records.items():
            if at + value._life_s > self._now:
                self.visit(key)
                self.number(at)
                self.visit(record)

    def tombstones(self, value: Tombstones[Any]) -> None:
        for key, (at, record) in value._records.items():
            if at + value._life_s <= self._now:
                continue
            self.visit(key)
            self.number(at)
            if isinstance(record, Ended):
                self.parts.append(record.state.name)
                self.visit(record.fault)
                self.visit(record.undelivered)

    def pool(self, value: BlockPool) -> None:
        self.parts.append("P")
        for block in value._free:
            self.block(block)
        self.parts.append("C")
        for block in value._cached:
            self.block(block)

    def cache(self, value: PrefixCache) -> None:
        for name, block in value._block_of.items():
            self.parts.append(name.hex())
            self.block(block)

    def holding(self, value: Holding) -> None:
        self.parts.append(f"H{value.state.name},{value.released}[")
        for block in value._blocks:
            self.block(block)
        self.parts.append("]")

    def memory(self, value: TagMemory) -> None:
        """After the pool, which meets every block; without one they keep their numbers."""
        for block in self._blocks or range(value.num_blocks):
            self.parts.append(value.cells[block].hex() + ",")

    def block(self, block: int) -> None:
        if self._as_numbered:
            self.parts.append(f"b{block},")
            return
        self.parts.append(f"b{self._blocks.setdefault(block, len(self._blocks))},")

    def request(self, value: RoutedRequest | RecoveringRequest) -> None:
        """Once it has ended nothing of it matters."""
        if value.ended:
            self.parts.append("over;")
        else:
            self.fields(value)

    def fields(self, value: Any) -> None:
        number = self._seen.get(id(value))
        if number is not None:
            self.parts.append(f"#{number};")
            return
        self._seen[id(value)] = len(self._seen)
        self.parts.append(type(value).__name__ + "(")
        for name in _names_of(value):
            if name in _BLOCKS:
                self.block_list(getattr(value, name))
            else:
                self.visit(getattr(value, name))
        self.parts.append(")")

    def block_list(self, value: Any) -> None:
        for block in value:
            self.block(block)


def _names_of(value: Any) -> list[str]:
    names = _SLOTS.get(type(value))
    if names is None:
        slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        names = _SLOTS[type(value)] = [name for name in slots if not name.startswith("__")]
    held = [*names, *getattr(value, "__dict__", ())]
    return [name for name in held if name not in _LEFT_OUT]


_SLOTS: dict[type, list[str]] = {}
_VISITORS: dict[type, Callable[[_Walk, Any], None]] = {
    int: _Walk.plain,
    str: _Walk.plain,
    bytes: _Walk.plain,
    bytearray: _Walk.plain,
    bool: _Walk.plain,
    type(None): _Walk.plain,
    count: _Walk.plain,
    float: _Walk.number,
    Fault: _Walk.fault,
    TransportFault: _Walk.transport_fault,
    Timers: _Walk.timers,
    Tombstones: _Walk.tombstones,
    Remembered: _Walk.remembered,
    RoutedRequest: _Walk.request,
    RecoveringRequest: _Walk.request,
    BlockPool: _Walk.pool,
    PrefixCache: _Walk.cache,
    Holding: _Walk.holding,
    TagMemory: _Walk.memory,
    Counter: _Walk.mapping,
    OrderedDict: _Walk.mapping,
    deque: _Walk.sequence,
}


def _visitor_of(kind: type) -> Callable[[_Walk, Any], None]:
    """How to walk over objects of a type that was not met before."""
    if issubclass(kind, _CONSTANT) or issubclass(kind, _CODE):
        return _Walk.nothing
    if issubclass(kind, enum.Enum):
        return lambda walk, value: walk.parts.append(f"{value.name};")
    if issubclass(kind, Proto):
        return _Walk.proto
    if issubclass(kind, tuple | list):
        return _Walk.sequence
    if issubclass(kind, dict | types.MappingProxyType):
        return _Walk.mapping
    if issubclass(kind, set | frozenset):
        return _Walk.unordered
    return _Walk.fields
