"""Several answers to one prompt: how many there may be, and the noise that each has."""

from __future__ import annotations

import hashlib
import struct

from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import sampling_pb2

MAX_CHOICES = 128
"""Each choice holds two calls of the router's and a transfer on P and D, and its answer for as long
as a slow client leaves it there. Other servers' limit, too, so that clients know it."""


def choices_of(params: sampling_pb2.SamplingParams) -> int:
    """How many are asked for, at least 1; not validated (see `choices_errors`)."""
    return max(1, int(params.n))


def choices_errors(params: sampling_pb2.SamplingParams) -> list[FieldError]:
    """What is wrong with their number."""
    if params.n <= MAX_CHOICES:
        return []
    return [FieldError("sampling.n", f"must be at most {MAX_CHOICES}")]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice, 64 bits, as `SamplingParams.n` has it: choice 0 has the request's own.

    A sum of both would have requests of neighbouring seeds share their choices.
    """
    if choice == 0:
        return seed
    digest = hashlib.sha256(struct.pack("<QI", seed, choice)).digest()
    return int.from_bytes(digest[:8], "little")


def of_one(params: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """A copy that asks for one choice, as P and D take it."""
    one = sampling_pb2.SamplingParams()
    one.CopyFrom(params)
    one.ClearField("n")
    return one
