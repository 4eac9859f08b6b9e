"""R2xx: the two legs of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.router.answers import placing, queued
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.protocol.faults import Fault, Reason

ANSWER = [901, 902, 903]
FEWEST_RANDOM_BITS = 64
"""What of 128 random bits can be seen for certain in a few dozen ids."""
IDS = 32


@case(
    201,
    "A router opens both legs of a request at once, Prefill on P and Generate on D, and "
    "neither waits for the other.",
)
async def both_legs_at_once(r: RouterHand) -> None:
    """Both legs come although neither P nor D says anything."""
    one = await r.routed()
    await one.finish(ANSWER)


@case(202, "1 to 128 characters of [A-Za-z0-9._:-], unique for ever")
async def one_ref_on_both_legs(r: RouterHand) -> None:
    """Both legs carry the same well-formed transfer_id, and attempt 1."""
    one = await r.routed()
    p, d = one.prefill.request.ref, one.decode.request.handoff.ref
    well_formed = re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", p.transfer_id)
    expect(well_formed is not None, "a well-formed transfer_id on Prefill", p)
    expect_equal(d.transfer_id, p.transfer_id, "the transfer_id of Generate, as Prefill's,")
    expect_equal((p.attempt, d.attempt), (1, 1), "the attempts of Prefill and Generate")
    await one.finish(ANSWER)


@case(
    203,
    "1 to 128 characters of [A-Za-z0-9._:-], unique for ever; at least 128 random bits when"
    " pd-grpc mints it.",
)
async def transfer_ids_are_random(r: RouterHand) -> None:
    """The ids of requests with one and the same request_id, one after another, are all different
    and random."""
    ids = []
    name = r.name("same")
    for _ in range(IDS):
        one = await r.routed(request_id=name)
        ids.append(one.ref.transfer_id)
        await one.finish(ANSWER[:2])
    expect_equal(len(set(ids)), IDS, "different transfer_ids:")
    bits = _random_bits(ids)
    expect(bits >= FEWEST_RANDOM_BITS, f"ids that vary by {FEWEST_RANDOM_BITS} bits or more", ids)


def _random_bits(ids: Sequence[str]) -> float:
    """At most how many bits vary from id to id, as far as so few ids show it."""
    return sum(math.log2(len(set(column))) for column in zip(*ids, strict=False))


@case(204, "Name of the D that is meant; another D refuses with WRONG_INSTANCE.")
async def the_legs_name_their_instances(r: RouterHand) -> None:
    """Each leg that names the instance it means names the one that it reaches, and decode_epoch is
    D's own or 0."""
    one = await r.routed()
    handoff = one.decode.request.handoff
    expect(handoff.decode_name in ("", r.d.name), f"decode_name {r.d.name} or none", handoff)
    expect(handoff.prefill_name in ("", r.p.name), f"prefill_name {r.p.name} or none", handoff)
    prefill_name = one.prefill.request.prefill_name
    expect(prefill_name in ("", r.p.name), f"prefill_name {r.p.name} or none", prefill_name)
    for ref in (handoff.ref, one.ref):
        expect(ref.decode_epoch in (0, r.d.instance.epoch), "decode_epoch of D's, or 0", ref)
    await one.finish(ANSWER)


@case(205, "Where to hand over: the first one, then alternates in order.")
async def prefill_is_told_of_the_decode_instance(r: RouterHand) -> None:
    """Prefill names D's control endpoint, and D's name or none."""
    one = await r.routed()
    targets = one.prefill.request.decodes
    expect_equal([t.endpoint for t in targets], [r.d.endpoint], "the endpoints in decodes")
    expect(targets[0].name in ("", r.d.name), f"the name {r.d.name} or none", targets[0])
    await one.finish(ANSWER)


@case(206, "The D that it calls is the first of Prefill's decodes.")
async def the_first_choice_has_the_leg(r: RouterHand) -> None:
    """With two Ds to choose from, the one that is called is the first that P is told of."""
    other = await r.offers_alternate()
    for _ in range(2):
        one = await r.routed()
        first = one.prefill.request.decodes[0].endpoint
        called = {d.name: d.endpoint for d in (r.d, other)}[one.decode.instance]
        expect_equal(called, first, "the endpoint called, the first of decodes,")
        await one.finish(ANSWER)


@case(207, "On placing it moves the client's leg to the D named there, under the same ref.")
async def placing_moves_the_leg(r: RouterHand) -> None:
    """Placing brings the leg to the other D, which then answers; the first D's leg ends."""
    other = await r.offers_alternate()
    one = await r.routed()
    first = one.decode
    target = other if first.instance == r.d.name else r.d
    one.prefill.send(queued(), placing(target))
    moved = await r.instances.next_generate(f"Generate called on {target.name} after placing")
    expect_equal(moved.instance, target.name, "the D called after placing")
    expect_equal(moved.request.handoff.ref.transfer_id, one.ref.transfer_id, "the transfer_id")
    expect_equal(moved.request.handoff.ref.attempt, one.ref.attempt, "the attempt")
    same = moved.request.token_ids == first.request.token_ids
    same = same and moved.request.sampling == first.request.sampling
    expect(same, "the same prompt and sampling on the leg that moved", moved.request)
    await first.cancelled("the leg has moved")
    one.decode = moved
    await one.finish(ANSWER)
    expect_equal(one.client.last.decode_instance, target.name, "decode_instance")


@case(208, "A refusal of the leg by the D that P is about to leave does not end the request.")
async def a_refusal_waits_for_placing(r: RouterHand) -> None:
    """D drains and refuses its leg, then P turns to the other D, which answers."""
    other = await r.offers_alternate()
    one = await r.routed()
    target = other if one.decode.instance == r.d.name else r.d
    one.decode.fail(Fault(Reason.DRAINING, "this D leaves"))
    await one.decode.over("D's leg over")
    one.prefill.send(placing(target))
    one.decode = await r.instances.next_generate(f"Generate called on {target.name}")
    await one.finish(ANSWER)
