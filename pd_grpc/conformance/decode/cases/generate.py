"""D65x and D66x: what D asks of a client's leg."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_field, check_metadata
from pd_grpc.conformance.case import NotApplicable, broken, quiet_s
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.sampling_values import beyond_bounds
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import inference_pb2, sampling_pb2

UNKNOWN_NAME = "Name of the D that is meant; another D refuses with WRONG_INSTANCE."
IDS = "At least one, each below the vocabulary's size; packed, up to a million."


@case(650, UNKNOWN_NAME)
async def another_decode_is_meant(d: DecodeHand) -> None:
    """The client means a D of another name, and is refused with both names."""
    request = d.request()
    name = d.name("d")
    handoff = inference_pb2.Handoff(ref=request.ref, decode_name=name)
    leg = d.generate(request, handoff=handoff)
    fault = await leg.fails(Reason.WRONG_INSTANCE, "another D is meant")
    check_metadata(fault, meant=name, here=d.subject.instance.name)


@case(651, "decode_epoch 0 means whichever D answers.")
async def whichever_decode_answers(d: DecodeHand) -> None:
    """The client names D and knows no epoch; P does, and the answer is right."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    handoff = inference_pb2.Handoff(ref=request.ref, decode_name=d.subject.instance.name)
    handoff.ref.decode_epoch = 0
    leg = d.generate(request, handoff=handoff)
    await HandOver(d, p, request, grant, leg).completes()


@case(652, "Any other process of D refuses it with FAILED_PRECONDITION, STALE_EPOCH.")
async def another_process_is_meant(d: DecodeHand) -> None:
    """The client names an epoch before D's, and is refused with both; its hand-over is unharmed."""
    p = await d.prefill()
    request = d.request()
    h = HandOver(d, p, request, await p.allocate(request), None)
    handoff = inference_pb2.Handoff(ref=request.ref)
    handoff.ref.decode_epoch -= 1
    leg = d.generate(request, handoff=handoff)
    fault = await leg.fails(Reason.STALE_EPOCH, "another process is meant")
    check_metadata(fault, meant=handoff.ref.decode_epoch, here=d.subject.instance.epoch)
    h.client_comes()
    await h.completes()


@case(653, "The prompt, exactly one of these. D takes token_ids only.")
async def text_and_messages(d: DecodeHand) -> None:
    """A prompt as text and one as messages are refused by the field's name."""
    messages = inference_pb2.ChatMessages()
    messages.messages.add(role="user", content="hello")
    for name, prompt in (("text", "hello"), ("messages", messages)):
        await _refused(d, name, token_ids=None, **{name: prompt})


@case(654, IDS)
async def no_prompt(d: DecodeHand) -> None:
    """A prompt of no tokens is refused by the field's name."""
    await _refused(d, "token_ids", token_ids=inference_pb2.TokenIds())


@case(655, IDS)
async def a_token_beyond_the_vocabulary(d: DecodeHand) -> None:
    """A prompt whose last token is none is refused by the field's name."""
    ids = [*d.request().prompt, d.subject.info.vocab_size]
    await _refused(d, "ids", token_ids=inference_pb2.TokenIds(ids=ids))


@case(656, "P and D refuse 0.")
async def no_max_tokens(d: DecodeHand) -> None:
    """A client that leaves max_tokens out is refused by the field's name."""
    await _refused(d, "max_tokens", sampling=sampling_pb2.SamplingParams())


@case(657, "a field is malformed, empty or out of its bounds; the prompt is longer than the model")
async def sampling_out_of_bounds(d: DecodeHand) -> None:
    """Each sampling field just beyond its bounds is refused by its name."""
    for field, sampling in beyond_bounds(d.subject.info.features):
        await _refused(d, field, sampling=sampling)


@case(658, "Output the client has already, fewer tokens than max_tokens.")
async def as_much_output_as_asked_for(d: DecodeHand) -> None:
    """A client that has max_tokens tokens already is refused by the field's name."""
    request = d.request()
    given = request.prompt[: request.sampling.max_tokens]
    await _refused(d, "generated_token_ids", generated_token_ids=given)


@case(659, "The client's name for the request, up to 128 characters, unique in flight.")
async def a_name_too_long(d: DecodeHand) -> None:
    """A request_id of 129 characters is refused by the field's name, and one of 128 is not."""
    await _refused(d, "request_id", request_id="r" * 129)
    await (await granted(d, d.request(request_id=d.name("r").ljust(128, "r")))).completes()


@case(660, "prompt plus max_tokens could never fit")
async def larger_than_the_pool(d: DecodeHand) -> None:
    """A client asks for more tokens than D has room for, and hears how many there are."""
    request = d.request()
    request.sampling.max_tokens = d.subject.room_tokens
    fault = await d.generate(request).fails(Reason.TOO_LARGE, "it could never fit")
    for name in ("needed", "total"):
        if not fault.metadata.get(name, "").isdecimal():
            broken(f"metadata {name!r} as a number", dict(fault.metadata))


@case(661, "Prompt plus output may have at most this many tokens.")
async def longer_than_the_model(d: DecodeHand) -> None:
    """A prompt as long as the model takes, with no room for output, is refused; one that leaves
    room for a token is not."""
    longest = d.subject.info.max_model_len
    if not 0 < longest <= 1 << 20:
        raise NotApplicable(f"a model of {longest} tokens is too long for the case")
    request = d.request()
    request.sampling.max_tokens = 1
    fits = inference_pb2.TokenIds(ids=request.prompt[:1] * (longest - 1))
    await d.generate(request, token_ids=fits).shows_nothing(quiet_s(), "a leg that waits for its P")
    ids = inference_pb2.TokenIds(ids=[d.request().prompt[0]] * longest)
    await d.generate(d.request(), token_ids=ids).fails(Reason.BAD_REQUEST, "longer than the model")


async def _refused(d: DecodeHand, field: str, **fields: Any) -> None:
    """A client's leg with these fields is refused for `field`."""
    leg = d.generate(d.request(), **fields)
    check_field(await leg.fails(Reason.BAD_REQUEST, f"{field} is out of bounds"), field)
