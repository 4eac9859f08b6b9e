"""What scripted instances answer, and how their answers are read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.router.server import RouterServer
from pd_grpc.v1 import inference_pb2, sampling_pb2
from tests.router.conftest import VOCAB, Site
from tests.router.scripted import handed_off, last, never, tokens

GREEDY = sampling_pb2.SamplingParams(max_tokens=4, temperature=0)
TEXT = SimTokenizer(VOCAB).encode("héllo")


async def hand_over(request: Any) -> AsyncIterator[Any]:
    yield handed_off(queue=1, prepare=2, allocate=1, compute=3, exposed_send=4)


async def say_hello(request: Any) -> AsyncIterator[Any]:
    yield tokens(*TEXT[:2])
    yield tokens(*TEXT[2:5])
    yield last(*TEXT[5:])


async def silence(request: Any) -> AsyncIterator[Any]:
    await never()
    yield


async def one_token_then_silence(request: Any) -> AsyncIterator[Any]:
    yield tokens(TEXT[0])
    await never()


async def rest_of(call: Any) -> list[inference_pb2.GenerateResponse]:
    """What follows of an answer that has been read by `read()`."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        messages.append(message)
    return messages


def hello(site: Site) -> None:
    """P hands over; every D says hello."""
    site.p.script, site.d1.script, site.d2.script = hand_over, say_hello, say_hello


async def until_ready(router: RouterServer, name: str, ready: bool) -> None:
    """Wait until the router knows an instance as ready or not."""
    discovery = router.discovery
    while next(v for v in discovery.instances if v.name == name).ready is not ready:
        await discovery.changed()
