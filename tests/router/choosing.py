"""Requests for several choices, and instances that answer each of them by a script of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from pd_grpc.protocol.choices import choice_seed
from pd_grpc.v1 import inference_pb2, sampling_pb2
from tests.router.answers import TEXT
from tests.router.conftest import Site
from tests.router.scripted import Script, last, tokens

N = 3


def several(n: int = N, **fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{"max_tokens": 9, "seed": 5, "n": n, **fields})


def by_choice(
    messages: list[inference_pb2.GenerateResponse],
) -> dict[int, list[inference_pb2.GenerateResponse]]:
    found: dict[int, list[inference_pb2.GenerateResponse]] = defaultdict(list)
    for message in messages:
        found[message.choice].append(message)
    return dict(found)


def tokens_of(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def of_choice(*scripts: Script) -> Script:
    """The script of each choice, by the seed of its leg."""
    seeds = [choice_seed(5, choice) for choice in range(len(scripts))]

    async def script(request: Any) -> AsyncIterator[Any]:
        async for message in scripts[seeds.index(request.sampling.seed)](request):
            yield message

    return script


def pausing(count: int, go_ahead: asyncio.Event) -> Script:
    """The first `count` tokens, and the rest when it is time."""

    async def script(request: Any) -> AsyncIterator[Any]:
        yield tokens(*TEXT[:count])
        await go_ahead.wait()
        yield last(*TEXT[count:])

    return script


def generated(site: Site) -> list[int]:
    """How many tokens each choice has that runs."""
    return [each.info().generated_tokens for each in site.router.in_flight.running()]
