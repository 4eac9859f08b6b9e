"""D1xx: how P and D meet, and what keeps a session alive."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.subject import Decode


@case(101, "P sends hello first and D answers welcome.")
async def welcome_answers_hello(d: Decode) -> None:
    """Hello with D's own layout is answered by a complete welcome."""
    p = await d.prefill()
    welcome = p.welcome
    expect(bool(welcome.session_id), "a session_id", welcome)
    expect(bool(welcome.shards), "at least one shard", welcome)
    expect_equal(welcome.layout, d.subject.info.layout, "layout, of GetModelInfo,")


@case(110, "Heartbeats renew the listed grants alone.")
async def heartbeats_renew_grants(d: Decode) -> None:
    """A grant that heartbeats list is alive after its lease; one that they do not list is not."""
    p = await d.prefill()
    kept, dropped = d.request(), d.request()
    held = await p.allocate(kept)
    lost = await p.allocate(dropped, hold=False)
    await p.told_of(dropped, "the end of a grant not listed", 2 * d.times.lease + 1)
    ack = await p.heartbeat(held.grant_id, lost.grant_id)
    expect_equal(list(ack.unknown_grant_ids), [lost.grant_id], "unknown_grant_ids")
    leg = d.generate(kept)
    wanted = d.answer(kept)
    await p.first_token(kept, held, wanted[0])
    await p.send_kv(kept, held)
    await leg.answers(wanted)
