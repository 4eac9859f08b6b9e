"""R3xx: what the client is shown."""

from __future__ import annotations

import contextlib
import time

from pd_grpc.conformance.case import Broken, eventually, expect, expect_equal, within
from pd_grpc.conformance.request import BUDGET_S
from pd_grpc.conformance.router.answers import P_TIMES_S, handed_off, last, tokens
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.routed import Routed
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2, types_pb2

ANSWER = [901, 902, 903, 904, 905]
REPLACEMENT = "\ufffd"
TAKES_S = 0.1
"""What D takes for a token whose time must show."""
ROUNDING_S = 0.002
"""Clocks are read beside what they measure."""
SLOW_TOKENS = 64
SLOW_MESSAGES = 500
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
"""A client that takes no more than 64 KiB before it reads; by default that may be megabytes."""


@case(301, "A piece of an answer. Carries every token that is ready.")
async def tokens_come_as_they_are_made(r: RouterHand) -> None:
    """Each token is shown while D has said no more, in order."""
    one = await r.routed()
    one.hand_over()
    for n, token in enumerate(ANSWER[:-1], 1):
        one.say(token)
        await one.shows(ANSWER[:n])
    one.say_last(ANSWER[-1])
    await one.answers(ANSWER)


@case(302, "Set on the last message, and only there: an answer without it is not complete.")
async def the_finish_reason_comes_last(r: RouterHand) -> None:
    """The reason that D gives is on the last message alone."""
    for reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH):
        one = await r.routed()
        one.hand_over()
        one.say(*ANSWER[:2])
        await one.shows(ANSWER[:2])
        one.say_last(*ANSWER[2:], reason=reason)
        await one.answers(ANSWER)
        seen = [m.finish_reason for m in one.client.messages]
        expect_equal(seen, [0] * (len(seen) - 1) + [reason], "finish_reason of each message")


@case(303, "New tokens; may be empty in the last message.")
async def a_last_message_without_tokens(r: RouterHand) -> None:
    """D's last message has no token: the answer is complete all the same."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER)
    await one.shows(ANSWER)
    one.say_last(reason=types_pb2.FINISH_REASON_STOP)
    await one.answers(ANSWER)
    expect_equal(one.client.last.finish_reason, types_pb2.FINISH_REASON_STOP, "finish_reason")


@case(304, "Those of prompt and answer are equal in aggregated and disaggregated mode.")
async def usage_is_what_decode_counted(r: RouterHand) -> None:
    """The last message has D's usage."""
    one = await r.routed()
    await one.finish(ANSWER)
    expect_equal(one.client.last.usage, one.usage, "usage of the last message, D's,")


@case(305, "route, queue, prepare, compute and first_token add up to the time to first token.")
async def timings_add_up(r: RouterHand) -> None:
    """D's first token and its last take their time: the parts of the router's timings, P's among
    them, add up to the time to the first token as the client sees it, and not to the total."""
    asked = time.monotonic()
    one = await r.routed()
    called = time.monotonic()
    one.hand_over()
    await one.client.shows_nothing(TAKES_S, "D has said nothing")
    held_s = time.monotonic() - called
    one.say(ANSWER[0])
    await one.shows(ANSWER[:1])
    shown_s = time.monotonic() - asked
    await one.client.shows_nothing(TAKES_S, "D has said no more")
    one.say_last(*ANSWER[1:])
    await one.answers(ANSWER)
    timings = one.client.last.timings
    parts = ("route", "queue", "prepare", "compute", "first_token")
    for name in (*parts, "total"):
        expect(timings.HasField(name), f"timings.{name}", timings)
    for name, value in P_TIMES_S.items():
        expect_equal(seconds(getattr(timings, name)), value, f"timings.{name}, P's,")
    added = sum(seconds(getattr(timings, name)) for name in parts)
    what = f"parts that add up to the first token's time, {held_s:.3f} to {shown_s:.3f} s"
    expect(held_s - ROUNDING_S <= added <= shown_s + ROUNDING_S, what, timings)
    total = seconds(timings.total)
    expect(total >= added + TAKES_S - ROUNDING_S, f"a total {TAKES_S:g} s above that", timings)


@case(306, "Set by the router on the last message: name of the instance that prefilled.")
async def the_last_message_names_the_instances(r: RouterHand) -> None:
    """The last message names P and D."""
    one = await r.routed()
    await one.finish(ANSWER)
    expect_equal(one.client.last.prefill_instance, r.p.name, "prefill_instance")
    expect_equal(one.client.last.decode_instance, r.d.name, "decode_instance")


@case(310, "Their text, from the router; D leaves it empty.")
async def text_is_the_same_whatever_the_pieces(r: RouterHand) -> None:
    """The same tokens have the same text, in one message of D's or in one for each."""
    texts = []
    for size in (len(ANSWER), 1):
        one = await r.routed()
        one.hand_over()
        for at in range(0, len(ANSWER), size):
            one.say(*ANSWER[at : at + size])
            await one.shows(ANSWER[: at + size])
        one.say_last()
        await one.answers(ANSWER)
        texts.append(_text(one))
    expect(bool(texts[0]), "text of the tokens", texts[0])
    expect_equal(texts[1], texts[0], "the text, piece by piece,")


@case(
    311,
    "Text whose last character is incomplete, or that may be the beginning of a stop string, "
    "comes with a later message.",
)
async def characters_are_not_split(r: RouterHand) -> None:
    """The tokens of a text with long characters are shown one by one: no character is cut."""
    text = "na\u00efve \U0001f99c caf\u00e9"
    probe = await r.routed(text=text)
    ids = probe.prompt
    await probe.finish(ANSWER)
    sampling = sampling_pb2.SamplingParams(max_tokens=len(ids) + 1, temperature=0)
    one = await r.routed(sampling=sampling)
    one.hand_over()
    for n, token in enumerate(ids, 1):
        one.say(token)
        await one.shows(ids[:n])
    one.say_last()
    await one.answers(ids)
    cut = [m for m in one.client.messages if REPLACEMENT in m.text]
    expect(not cut, "no message with half a character", cut)
    expect(text in _text(one), f"the text {text!r}", repr(_text(one)))


@case(312, "Strings that end the answer; the text ends before them.")
async def text_ends_before_a_stop_string(r: RouterHand) -> None:
    """The text of an answer that D ended at a stop string ends before it; every token is shown."""
    whole = await _text_of(r, ANSWER)
    stop = whole[-2:]
    shown = ANSWER[:1]
    while stop not in await _text_of(r, shown):
        shown = ANSWER[: len(shown) + 1]
    one = await r.routed(
        sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0, stop=[stop])
    )
    one.hand_over()
    for n, token in enumerate(shown, 1):
        one.say(token)
        await one.shows(shown[:n])
    one.say_last(reason=types_pb2.FINISH_REASON_STOP)
    await one.answers(shown)
    expect_equal(_text(one), whole[: whole.index(stop)], "the text before the stop string")


@case(
    313,
    "Text whose last character is incomplete, or that may be the beginning of a stop"
    " string, comes with a later message.",
)
async def the_beginning_of_a_stop_string_waits(r: RouterHand) -> None:
    """Text that a stop string begins with is shown no sooner than it is known not to be one."""
    begun = await _text_of(r, ANSWER[:3])
    whole = await _text_of(r, ANSWER)
    stop = begun[-2:] + "\u2603"
    one = await r.routed(
        sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0, stop=[stop])
    )
    one.hand_over()
    for n in range(1, 4):
        one.say(ANSWER[n - 1])
        await one.shows(ANSWER[:n])
    expect_equal(_text(one), begun[:-2], "the text before what may be a stop string")
    one.say_last(*ANSWER[3:])
    await one.answers(ANSWER)
    expect_equal(_text(one), whole, "the whole text")


@case(320, "One per token where sampling.logprobs asks for it.")
async def logprobs_pass(r: RouterHand) -> None:
    """The log-probabilities that D reports reach the client, one for each token."""
    one = await r.routed(
        sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    )
    one.hand_over()
    sent = [_logprobs(token) for token in ANSWER]
    for token, each in zip(ANSWER, sent, strict=True):
        one.decode.send(inference_pb2.GenerateResponse(token_ids=[token], logprobs=[each]))
    one.say_last()
    await one.answers(ANSWER)
    seen = [each for message in one.client.messages for each in message.logprobs]
    expect_equal(seen, sent, "logprobs")


@case(330, "A slow reader gets fewer, larger messages.")
async def a_slow_reader_loses_nothing(r: RouterHand) -> None:
    """A client that reads nothing until D has ended gets every token, in fewer messages than D
    sent."""
    count = SLOW_TOKENS * SLOW_MESSAGES
    sampling = sampling_pb2.SamplingParams(max_tokens=count, temperature=0)
    wanted = [300 + n % 1000 for n in range(count)]
    messages = []
    async with r.channel_with(SMALL_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(r.request(sampling=sampling), timeout=BUDGET_S)
        prefill = await r.instances.next_prefill()
        decode = await r.instances.next_generate()
        prefill.send(handed_off(r.d, len(prefill.request.token_ids)))
        prefill.end()
        for at in range(0, count, SLOW_TOKENS):
            decode.send(tokens(wanted[at : at + SLOW_TOKENS]))
        await _until_taken(r, prefill.request.ref.transfer_id, count)
        decode.send(last([], types_pb2.Usage(completion_tokens=count), r.d.name))
        decode.end()
        while isinstance(
            message := await within(None, call.read(), "a message of Generate"),
            inference_pb2.GenerateResponse,
        ):
            messages.append(message)
    expect([t for m in messages for t in m.token_ids] == wanted, "every token, in order", "others")
    limit = SLOW_MESSAGES // 2
    expect(len(messages) < limit, f"fewer than {limit} messages", len(messages))


async def _until_taken(r: RouterHand, transfer_id: str, count: int) -> None:
    """Wait until the router has so many tokens of a request. One that takes no more than its client
    reads never does; it is left alone after a while."""
    with contextlib.suppress(Broken):
        await eventually(
            lambda: r.listed(transfer_id),
            lambda info: info is not None and info.generated_tokens >= count,
            f"{count} tokens taken in",
        )


def _text(one: Routed) -> str:
    """All text shown so far."""
    return "".join(message.text for message in one.client.messages)


async def _text_of(r: RouterHand, ids: list[int]) -> str:
    """The text that the router has for tokens."""
    one = await r.routed()
    await one.finish(ids)
    return _text(one)


def _logprobs(token: int) -> types_pb2.PositionLogprobs:
    chosen = types_pb2.TokenLogprob(token_id=token, logprob=-token / 1000)
    return types_pb2.PositionLogprobs(chosen=chosen, top=[chosen])
