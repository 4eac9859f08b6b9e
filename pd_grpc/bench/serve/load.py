"""What is asked, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.bench.trace import read_trace
from pd_grpc.bench.workload import Length

_FIRST_ID, _IDS = 1000, 30_000
"""Prompts are of these token ids, which every vocabulary of ours has."""
_TRACE_MINUTES = 10.0


class NoFit(ValueError):
    """Nothing of the trace fits the model; the message says what would."""


@dataclass(frozen=True)
class Request:
    """A prompt to be answered with exactly `output` tokens, `at_s` after the load begins."""

    name: str
    at_s: float
    token_ids: Sequence[int]
    output: int


def prompt_of(name: str, tokens: int) -> list[int]:
    """Drawn by name, so that no two requests begin alike and no prefix is found anywhere."""
    return random.Random(name).choices(range(_FIRST_ID, _FIRST_ID + _IDS), k=tokens)


def scaled_lengths(scale: float, longest: int) -> list[Length]:
    """The lengths of the trace times `scale`, an answer of two tokens at the least; without those
    whose prompt and answer are longer than `longest` together. NoFit when none is left."""
    lengths = [
        Length(max(1, round(scale * each.prompt)), max(2, round(scale * each.output)))
        for each in (arrival.length for arrival in read_trace(None, _TRACE_MINUTES))
    ]
    fitting = [each for each in lengths if each.prompt + each.output <= longest]
    if not fitting:
        raise NoFit(f"--scale {scale:g}: no request of the trace fits {longest} tokens")
    return fitting


def drawn(lengths: Sequence[Length], count: int, seed: str) -> list[Length]:
    """So many of them, drawn with replacement; the same for the same seed."""
    return random.Random(f"lengths {seed}").choices(lengths, k=count)


def poisson_times(count: int, rate_per_s: float, seed: str) -> list[float]:
    """Moments of a Poisson process of this rate of which it is known that `count` fell into
    count / rate seconds: so many that are drawn evenly. The rate that is offered is so exact,
    however few they are."""
    draw = random.Random(f"times {seed}")
    return sorted(draw.uniform(0.0, count / rate_per_s) for _ in range(count))


def requests_of(name: str, times: Sequence[float], lengths: Sequence[Length]) -> list[Request]:
    """In their order; names begin with `name`."""
    return [
        Request(f"{name}-{i}", at_s, prompt_of(f"{name}-{i}", length.prompt), length.output)
        for i, (at_s, length) in enumerate(zip(times, lengths, strict=True))
    ]
