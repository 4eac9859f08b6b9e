"""Who is concerned by a client's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pd_grpc.router.policies import Pairing


class Route(NamedTuple):
    """Numbers of processes: a client, the first D of its request, and as bits, itself with those
    that the request is sent to at first, and with all that it may come to."""

    client: int
    decode: int
    first: int
    all: int


def route_of(numbers: Mapping[str, int], client: int, pairing: Pairing) -> Route:
    """The route of a client."""
    decode = numbers[pairing.decode.name]
    first = 1 << client | 1 << decode
    if pairing.prefill is not None:
        first |= 1 << numbers[pairing.prefill.name]
    others = sum(1 << numbers[target.name] for target in pairing.alternates)
    return Route(client, decode, first, first | others)
