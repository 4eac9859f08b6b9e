"""S6: what is sent to several Ds succeeds or fails for each request on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.interception import Interceptors
from tests.prefill.cluster import answer_to, request_to, running

NOBODY = "127.0.0.1:1"


async def test_every_request_hears_what_became_of_itself() -> None:
    async with running() as cluster:
        p = await cluster.prefill()
        good = await cluster.decode()
        other = await cluster.decode(block_size=8)
        small = await cluster.decode(num_blocks=8)
        wanted = {
            good.endpoint: None,
            other.endpoint: Reason.LAYOUT_MISMATCH,
            small.endpoint: Reason.TOO_LARGE,
            NOBODY: Reason.DECODE_LOST,
        }
        requests = [request_to(d, random_seed=n) for n in range(3) for d in wanted]
        mine = [r for r in requests if r.decodes[0].endpoint == good.endpoint]
        prefills, answers = await asyncio.gather(
            asyncio.gather(*(cluster.run_prefill(p, r) for r in requests)),
            asyncio.gather(*(cluster.run_generate(good, r) for r in mine)),
        )
        for request, outcome in zip(requests, prefills, strict=True):
            reason = outcome.fault.reason if isinstance(outcome.fault, Fault) else outcome.fault
            assert reason is wanted[request.decodes[0].endpoint]
            handed_off = any(m.HasField("handed_off") for m in outcome.messages)
            assert handed_off == (outcome.fault is None), "a failure is never called a success"
        assert [answer.tokens for answer in answers] == [answer_to(r) for r in mine]


class Odd(Exception):
    """What an embedder's code raises."""


class OddAllocates(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Raises for one transfer; grpc hands on what it raises in the call's future."""

    def __init__(self, transfer_id: str) -> None:
        self._transfer_id = transfer_id

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        if request.ref.transfer_id == self._transfer_id:
            raise Odd("no Allocate for this one")
        return continuation(details, request)


class OddChannel:
    """Raises for one transfer as soon as the call is made."""

    def __init__(self, channel: grpc.Channel, transfer_id: str) -> None:
        self._channel = channel
        self._transfer_id = transfer_id

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return OddCall(self._channel.unary_unary(*args, **kwargs), self._transfer_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class OddCall:
    """One method of an OddChannel."""

    def __init__(self, call: Any, transfer_id: str) -> None:
        self._call = call
        self._transfer_id = transfer_id

    def future(self, request: Any, **kwargs: Any) -> Any:
        if request.ref.transfer_id == self._transfer_id:
            raise Odd("no Allocate for this one")
        return self._call.future(request, **kwargs)


class OddFirstTokens(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Raises for the first token of one transfer."""

    def __init__(self, transfer_id: str) -> None:
        self._transfer_id = transfer_id

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        if b"SendFirstToken" in details.method and request.ref.transfer_id == self._transfer_id:
            raise Odd("no first token for this one")
        return await continuation(details, request)


def _in_the_future(odd: str) -> Interceptors:
    return Interceptors(futures=lambda channel: grpc.intercept_channel(channel, OddAllocates(odd)))


def _at_once(odd: str) -> Interceptors:
    futures: Any = lambda channel: OddChannel(channel, odd)  # noqa: E731
    return Interceptors(futures=futures)


def _with_the_first_token(odd: str) -> Interceptors:
    client: Any = (OddFirstTokens(odd),)
    return Interceptors(client=client)


@pytest.mark.parametrize("interceptors", [_in_the_future, _at_once, _with_the_first_token])
async def test_a_call_that_cannot_be_made_fails_its_request_alone(
    interceptors: Callable[[str], Interceptors],
) -> None:
    """The others that are asked for in the same breath are asked for all the same."""
    async with running() as cluster:
        d = await cluster.decode()
        requests = [request_to(d, random_seed=n) for n in range(5)]
        odd = requests[2]
        p = await cluster.prefill(interceptors=interceptors(odd.ref.transfer_id))
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(cluster.run(p, d, each) for each in requests)), 10
        )
        for request, (prefill, generate) in zip(requests, outcomes, strict=True):
            if request is odd:
                for fault in (prefill.fault, generate.fault):
                    assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_ERROR
            else:
                assert prefill.fault is None and generate.tokens == answer_to(request)


async def test_a_channel_that_cannot_be_made_fails_one_request_alone() -> None:
    made: list[grpc.Channel] = []

    def odd_at_first(channel: grpc.Channel) -> grpc.Channel:
        made.append(channel)
        if len(made) == 1:
            raise Odd("no channel")
        return channel

    async with running() as cluster:
        d = await cluster.decode()
        p = await cluster.prefill(interceptors=Interceptors(futures=odd_at_first))
        requests = [request_to(d, random_seed=n) for n in range(5)]
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(cluster.run(p, d, each) for each in requests)), 10
        )
        faults = [prefill.fault for prefill, _ in outcomes if prefill.fault is not None]
        assert [isinstance(f, Fault) and f.reason for f in faults] == [Reason.ENGINE_ERROR]
        for request, (prefill, generate) in zip(requests, outcomes, strict=True):
            assert prefill.fault is not None or generate.tokens == answer_to(request)
