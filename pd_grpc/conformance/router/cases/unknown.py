"""R80x: what a later version adds."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.later import UNKNOWN_VALUE, later, with_unknown
from pd_grpc.conformance.router.answers import handed_off, last, queued, tokens
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.v1 import prefill_pb2

ANSWER = [901, 902, 903]


@case(801, "A server ignores fields that it does not know")
async def unknown_fields_of_the_clients(r: RouterHand) -> None:
    """A request with fields of a later version, in it and in all within, is answered."""
    one = await r.both_legs(r.call(later(r.request())))
    await one.finish(ANSWER)


@case(802, "A server ignores fields that it does not know")
async def unknown_fields_of_the_instances(r: RouterHand) -> None:
    """Messages of P and D with fields of a later version are taken as they are."""
    one = await r.routed()
    messages = [queued(), handed_off(r.d, len(one.prompt))]
    one.prefill.send(*map(later, messages))
    one.prefill.end()
    pieces = [tokens(ANSWER[:1]), last(ANSWER[1:], one.usage, r.d.name)]
    one.decode.send(*map(later, pieces))
    one.decode.end()
    await one.answers(ANSWER)


@case(
    803,
    "A message of a stream that has none of the known members is ignored by whoever reads a "
    "Session after its first message, or an answer",
)
async def an_unknown_event_of_prefills(r: RouterHand) -> None:
    """P sends an event of a later version, and an empty one, before it hands over: the answer goes
    on to its end."""
    one = await r.routed()
    empty = prefill_pb2.PrefillResponse()
    one.prefill.send(queued(), later(empty), empty)
    one.say(ANSWER[0])
    await one.shows(ANSWER[:1])
    one.hand_over()
    one.say(ANSWER[1])
    await one.shows(ANSWER[:2])
    one.say_last(*ANSWER[2:])
    await one.answers(ANSWER)


@case(804, "Set on the last message, and only there: an answer without it is not complete.")
async def a_finish_reason_of_a_later_version(r: RouterHand) -> None:
    """D ends for a reason of a later version: the answer is complete, and the client is given
    it."""
    one = await r.routed()
    one.hand_over()
    one.say(*ANSWER[:2])
    await one.shows(ANSWER[:2])
    message = last(ANSWER[2:], one.usage, r.d.name)
    one.decode.send(with_unknown(message, "finish_reason"))
    one.decode.end()
    await one.answers(ANSWER)
    expect_equal(one.client.last.finish_reason, UNKNOWN_VALUE, "finish_reason")


@case(
    805,
    "Text whose last character is incomplete, or that may be the beginning of a stop string, "
    "comes with a later message.",
)
async def text_of_an_empty_end(r: RouterHand) -> None:
    """An answer that ends within a character is given out to its last token."""
    probe = await r.routed(text="\U0001f99c")
    ids = probe.prompt
    await probe.finish(ANSWER)
    one = await r.routed()
    one.hand_over()
    one.say(*ids[:-1])
    one.say_last()
    await one.answers(ids[:-1])
    expect(bool(one.client.last.finish_reason), "an end", one.client.last)
