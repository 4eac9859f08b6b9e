"""R13x to R15x: what is refused before any leg is opened."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_feature, check_field, check_metadata
from pd_grpc.conformance.later import with_unknown
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.conformance.sampling_values import beyond_bounds, reserved_sampling, reserved_scopes
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import inference_pb2, sampling_pb2

ANSWER = [901, 902, 903]


@case(131, "The prompt, exactly one of these.")
async def no_prompt(r: RouterHand) -> None:
    """A request without a prompt is refused."""
    await r.refused(
        Reason.BAD_REQUEST,
        "there is no prompt",
        inference_pb2.GenerateRequest(sampling=sampling_pb2.SamplingParams(max_tokens=3)),
    )


@case(132, "a field is malformed, empty or out of its bounds")
async def empty_prompts(r: RouterHand) -> None:
    """An empty text, no messages and no token ids are refused, each by the name of its field."""
    empty: list[dict[str, Any]] = [
        {"text": ""},
        {"messages": inference_pb2.ChatMessages()},
        {"token_ids": inference_pb2.TokenIds()},
    ]
    for fields in empty:
        (name,) = fields
        fault = await r.refused(Reason.BAD_REQUEST, f"{name} is empty", **fields)
        check_field(fault, name)


@case(133, "May be empty, but not in every message.")
async def messages_without_content(r: RouterHand) -> None:
    """Messages that say nothing are refused; one empty one among others is not."""
    said, unsaid = (
        inference_pb2.ChatMessage(role="user", content=content) for content in ("hello", "")
    )
    silent = inference_pb2.ChatMessages(messages=[unsaid, unsaid])
    fault = await r.refused(Reason.BAD_REQUEST, "no message has content", messages=silent)
    check_field(fault, "content")
    one = await r.routed(messages=inference_pb2.ChatMessages(messages=[unsaid, said]))
    await one.finish(ANSWER)


@case(
    134,
    "BAD_REQUEST comes with google.rpc.BadRequest, a violation for each field that is"
    " wrong, by its path from the message sent, such as sampling.top_p or"
    " hello.instance.name",
)
async def sampling_out_of_bounds(r: RouterHand) -> None:
    """Each bound of sampling is kept, and a refusal names the field."""
    for name, sampling in beyond_bounds(r.subject.info.features):
        fault = await r.refused(Reason.BAD_REQUEST, f"a bad {name}", sampling=sampling)
        check_field(fault, name)


@case(
    135,
    "BAD_REQUEST comes with google.rpc.BadRequest, a violation for each field that is"
    " wrong, by its path from the message sent, such as sampling.top_p or"
    " hello.instance.name",
)
async def every_wrong_field_is_named(r: RouterHand) -> None:
    """A request with two wrong fields is refused with a violation for each."""
    sampling = sampling_pb2.SamplingParams(max_tokens=8, temperature=-1, top_p=2)
    fault = await r.refused(Reason.BAD_REQUEST, "two fields are wrong", sampling=sampling)
    for name in ("temperature", "top_p"):
        check_field(fault, name)


@case(136, "the prompt is longer than the model")
async def a_prompt_longer_than_the_model(r: RouterHand) -> None:
    """A prompt that fills the whole model, without room for a token of output, is refused."""
    prompt = inference_pb2.TokenIds(ids=[7] * r.subject.max_model_len)
    fault = await r.refused(Reason.BAD_REQUEST, "the prompt fills the model", token_ids=prompt)
    check_field(fault, "token_ids")


@case(137, "TOO_LARGE has needed and total")
async def prompt_and_output_beyond_the_model(r: RouterHand) -> None:
    """A prompt with more max_tokens than the model has room for is refused with both numbers."""
    total = r.subject.max_model_len
    sampling = sampling_pb2.SamplingParams(max_tokens=total, temperature=0)
    prompt = r.prompt(10)
    fault = await r.refused(
        Reason.TOO_LARGE,
        "prompt plus max_tokens is more than the model takes",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling,
    )
    check_metadata(fault, needed=total + len(prompt), total=total)


@case(138, "Token ids are below this.")
async def token_ids_outside_the_vocabulary(r: RouterHand) -> None:
    """A token id that is not below vocab_size is refused in the prompt, in earlier output, among
    stop ids and among those with a bias."""
    wrong = r.subject.vocab_size
    prompt = inference_pb2.TokenIds(ids=[7, wrong])
    await r.refused(Reason.BAD_REQUEST, f"token_ids has {wrong}", token_ids=prompt)
    await r.refused(
        Reason.BAD_REQUEST, f"generated_token_ids has {wrong}", generated_token_ids=[wrong]
    )
    sampling = sampling_pb2.SamplingParams(max_tokens=8, stop_token_ids=[wrong])
    await r.refused(Reason.BAD_REQUEST, f"stop_token_ids has {wrong}", sampling=sampling)
    if "logit_bias" in r.subject.info.features:
        biased = sampling_pb2.SamplingParams(max_tokens=8, logit_bias={7: 1.0, wrong: 1.0})
        what = f"logit_bias has {wrong}"
        fault = await r.refused(Reason.BAD_REQUEST, what, sampling=biased)
        check_field(fault, "logit_bias")


@case(139, "The router refuses it with BAD_REQUEST.")
async def a_hand_off_of_the_clients(r: RouterHand) -> None:
    """A request that carries a hand-off is refused."""
    fault = await r.refused(
        Reason.BAD_REQUEST,
        "the client has set handoff",
        handoff=inference_pb2.Handoff(decode_name=r.d.name),
    )
    check_field(fault, "handoff")


@case(140, "Output the client has already, fewer tokens than max_tokens.")
async def no_room_after_earlier_output(r: RouterHand) -> None:
    """Earlier output of max_tokens tokens is refused."""
    sampling = sampling_pb2.SamplingParams(max_tokens=3, temperature=0)
    fault = await r.refused(
        Reason.BAD_REQUEST,
        "the answer has max_tokens already",
        sampling=sampling,
        generated_token_ids=[7, 8, 9],
    )
    check_field(fault, "generated_token_ids")


@case(141, "The client's name for the request, up to 128 characters, unique in flight.")
async def a_request_id_too_long(r: RouterHand) -> None:
    """A name of 129 characters is refused."""
    fault = await r.refused(Reason.BAD_REQUEST, "the name is too long", request_id="x" * 129)
    check_field(fault, "request_id")


@case(
    142,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server"
    " that was not built for it, and so is one that needs a feature which was not negotiated",
)
async def reserved_fields_of_sampling(r: RouterHand) -> None:
    """Each reserved field of sampling is refused by its name."""
    for path, sampling in reserved_sampling():
        fault = await r.refused(Reason.FEATURE, f"{path} is reserved", sampling=sampling)
        check_feature(fault, path)


@case(143, "Cache salt and reserved fields of the request.")
async def reserved_fields_of_scope(r: RouterHand) -> None:
    """Each reserved field of the request is refused by its name."""
    for path, scope in reserved_scopes():
        check_feature(await r.refused(Reason.FEATURE, f"{path} is reserved", scope=scope), path)


@case(
    144,
    "with FEATURE where the value names a way to do the thing (kind of a layout's group or"
    " plane, transport of a Transfer, direction), with BAD_REQUEST elsewhere.",
)
async def an_unknown_direction(r: RouterHand) -> None:
    """A direction of a later version is refused."""
    scope = with_unknown(sampling_pb2.RequestScope(), "direction")
    fault = await r.refused(Reason.FEATURE, "the direction is unknown", scope=scope)
    check_feature(fault, "scope.direction")


@case(
    150,
    "ALREADY_EXISTS with DUPLICATE_REQUEST while the same request_id is in flight, or of a"
    " hand-over with DUPLICATE_TRANSFER while the same ref has a client",
)
async def a_request_id_in_flight(r: RouterHand) -> None:
    """A second request of a name in flight is refused, the first goes on, and the name is free
    again after its end."""
    name = r.name("twin")
    first = await r.routed(request_id=name)
    first.say(*ANSWER[:1])
    await first.shows(ANSWER[:1])
    await r.refused(Reason.DUPLICATE_REQUEST, "its name is in flight", request_id=name)
    first.hand_over()
    first.say_last(*ANSWER[1:])
    await first.answers(ANSWER)
    again = await r.routed(request_id=name)
    await again.finish(ANSWER)
