"""What the router refuses before it asks any instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1 import inference_pb2, sampling_pb2, types_pb2
from tests.router.answers import (
    GREEDY,
    TEXT,
    hand_over,
    hello,
    rest_of,
    until_ready,
)
from tests.router.conftest import VOCAB, Site
from tests.router.scripted import last, tokens
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "text"),
        ({"messages": inference_pb2.ChatMessages()}, "messages"),
        (
            {
                "messages": inference_pb2.ChatMessages(
                    messages=[inference_pb2.ChatMessage(role="user")]
                )
            },
            "messages.messages[0].content",
        ),
        ({"token_ids": inference_pb2.TokenIds()}, "token_ids"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1, VOCAB])}, "token_ids.ids[1]"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1] * 1000)}, "token_ids"),
        ({"text": "x" * 5000}, "text"),
        ({"generated_token_ids": [VOCAB + 1]}, "generated_token_ids[0]"),
        ({"generated_token_ids": [1, 2, 3, 4]}, "generated_token_ids"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"handoff": inference_pb2.Handoff()}, "handoff"),
        (
            {
                "messages": inference_pb2.ChatMessages(
                    messages=[inference_pb2.ChatMessage(role="imp", content="hi")]
                )
            },
            "messages",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(temperature=float("nan"))},
            "sampling.temperature",
        ),
        ({"sampling": sampling_pb2.SamplingParams(temperature=-1)}, "sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(top_p=0)}, "sampling.top_p"),
        ({"sampling": sampling_pb2.SamplingParams(top_k=-1)}, "sampling.top_k"),
        ({"sampling": sampling_pb2.SamplingParams(max_tokens=-3)}, "sampling.max_tokens"),
        (
            {"sampling": sampling_pb2.SamplingParams(max_tokens=3, min_tokens=4)},
            "sampling.min_tokens",
        ),
        ({"sampling": sampling_pb2.SamplingParams(min_tokens=300)}, "sampling.min_tokens"),
        ({"sampling": sampling_pb2.SamplingParams(logprobs=21)}, "sampling.logprobs"),
        (
            {"sampling": sampling_pb2.SamplingParams(stop_token_ids=[VOCAB])},
            "sampling.stop_token_ids[0]",
        ),
        ({"sampling": sampling_pb2.SamplingParams(stop=[""])}, "sampling.stop"),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field_before_any_leg_opens(
    fields: dict[str, Any], field: str, site: Site
) -> None:
    fault = await site.fault(**fields)
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.BAD_REQUEST)
    assert fault.fields[0].field == field
    assert field in fault.message
    assert not site.p.requests and not site.d1.requests and not site.d2.requests


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "text: the prompt must not be empty"),
        (
            {"token_ids": inference_pb2.TokenIds(ids=[1] * 1000)},
            "token_ids: the prompt has 1000 tokens; the model takes at most 999 and one of output",
        ),
        (
            {"sampling": sampling_pb2.SamplingParams(max_tokens=-1)},
            "sampling.max_tokens: must be at least 1",
        ),
    ],
)
async def test_a_refusal_says_what_is_wrong_and_nothing_else(
    fields: dict[str, Any], message: str, site: Site
) -> None:
    assert (await site.fault(**fields)).message == message


async def test_a_request_without_a_prompt_is_refused(site: Site) -> None:
    call = site.stub.Generate(inference_pb2.GenerateRequest(sampling=GREEDY))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "one of text, messages and token_ids" in (raised.value.details() or "")


async def test_prompt_and_output_beyond_the_model_name_what_is_needed_and_what_there_is(
    site: Site,
) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=998, temperature=0)
    fault = await site.fault(sampling=sampling)
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.TOO_LARGE)
    assert (fault.metadata["needed"], fault.metadata["total"]) == ("1001", "1000")


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"scope": sampling_pb2.RequestScope(adapter="lora")}, "scope.adapter"),
        (
            {"sampling": sampling_pb2.SamplingParams(prompt_logprobs=True)},
            "sampling.prompt_logprobs",
        ),
    ],
)
async def test_a_field_reserved_but_not_built_is_refused(
    fields: dict[str, Any], feature: str, site: Site
) -> None:
    fault = await site.fault(**fields)
    assert (fault.code, fault.reason) == (Code.UNIMPLEMENTED, Reason.FEATURE)
    assert fault.metadata["feature"] == feature


async def test_what_one_instance_has_not_is_refused_by_name(site: Site) -> None:
    del site.d2.model.features[:]
    site.d2.control.set_ready(False)
    await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
    site.d2.control.set_ready(True)
    await asyncio.wait_for(until_ready(site.router, "d2", True), LIMIT_S)
    for field, value in FEATURES.items():
        fault = await site.fault(sampling=sampling_pb2.SamplingParams(**{field: value}))
        assert (fault.reason, fault.metadata["feature"]) == (Reason.FEATURE, f"sampling.{field}")


async def test_a_second_request_of_one_name_is_refused_and_the_first_unharmed(site: Site) -> None:
    go_on = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await go_on.wait()
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = hand_over, slow
    first = site.generate(request_id="twin")
    await first.read()
    fault = await site.fault(request_id="twin")
    assert (fault.code, fault.reason) == (Code.ALREADY_EXISTS, Reason.DUPLICATE_REQUEST)
    assert len(site.p.requests) == 1, "the second one was scheduled"
    go_on.set()
    assert (await rest_of(first))[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    hello(site)
    assert await site.answer(request_id="twin"), "the name is free again"
