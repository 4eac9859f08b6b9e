"""Transports by the names that settings have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TypeVar

from pd_grpc.transport.base import NotUsable, TransportKind
from pd_grpc.transport.inline import TRANSPORT as INLINE

Half = TypeVar("Half")


class UnknownTransport(ValueError):
    """There is no such transport, or it cannot be told from another."""


def find(names: Iterable[str]) -> list[TransportKind]:
    """The transports of these names, best first, inline behind them unless it is among them.

    A name without a dot is a module of this package, one with a dot any other module that can be
    imported; either has a `TRANSPORT`. UnknownTransport when there is no such transport, or when
    two have the same value on the wire.
    """
    kinds = [_find(name) for name in names]
    if INLINE not in kinds:
        kinds.append(INLINE)
    by_value: dict[int, TransportKind] = {}
    for kind in kinds:
        other = by_value.setdefault(kind.value, kind)
        if other is not kind:
            raise UnknownTransport(f"transports {other.name} and {kind.name} are both {kind.value}")
    return list(by_value.values())


def build(
    kinds: Iterable[TransportKind],
    shards: int,
    make: Callable[[TransportKind], Half],
    unusable: Callable[[TransportKind, NotUsable], object],
) -> Mapping[int, tuple[TransportKind, Half]]:
    """One half of each, in the same order; those that cannot be used here are left out and told. An
    instance with several shards can use none by which P writes into D's memory itself."""
    found: dict[int, tuple[TransportKind, Half]] = {}
    for kind in kinds:
        try:
            if kind.one_sided and shards > 1:
                raise NotUsable(f"an instance of {shards} shards has no memory that P writes to")
            found[kind.value] = kind, make(kind)
        except NotUsable as error:
            unusable(kind, error)
    return found


def _find(name: str) -> TransportKind:
    module = name if "." in name else f"{__package__}.{name}"
    try:
        kind = getattr(import_module(module), "TRANSPORT", None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise UnknownTransport(f"transports: there is no transport {name}") from None
        raise
    if not isinstance(kind, TransportKind):
        raise UnknownTransport(f"transports: {module} is no transport: it has no TRANSPORT")
    return kind
