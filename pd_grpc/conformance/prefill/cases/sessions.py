"""P1xx: how P joins a D, keeps its session alive, and mends it."""

from __future__ import annotations

import asyncio
from typing import Any

from pd_grpc.conformance.calls import check_feature
from pd_grpc.conformance.case import answer_s, expect, expect_equal
from pd_grpc.conformance.channels import new_epoch
from pd_grpc.conformance.later import later
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import CONNECTION_LOST, KitDecode, KitTimes
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2, types_pb2

QUICK = KitTimes(heartbeat=0.2, lease=0.6, grace=0.4)
"""Of a D whose heartbeats are watched."""


@case(101, "Who P is; its role is ROLE_PREFILL.")
async def hello_says_who(p: PrefillHand) -> None:
    """Hello names an instance with the role of a prefill and an epoch, the same to every D."""
    d, other = await p.decode(), await p.decode()
    await p.call(p.request(), d).handed_off()
    await p.call(p.request(), other).handed_off()
    who = d.hello.seen[0].instance
    expect(who.role == types_pb2.ROLE_PREFILL, "the role ROLE_PREFILL", who)
    expect(1 <= len(who.name) <= 128 and who.epoch > 0, "a name and an epoch", who)
    expect_equal(other.hello.seen[0].instance, who, "the instance, in the Hello to another D,")


@case(102, "Its stable name; checked at Hello.")
async def hello_names_the_decode(p: PrefillHand) -> None:
    """Hello carries the name of the D that the request means, and none where it means any."""
    named, unnamed = await p.decode(), await p.decode()
    await p.call(p.request(), named).handed_off()
    await p.call(p.request(), unnamed.endpoint).handed_off()
    expect_equal(named.hello.seen[0].decode_name, named.instance.name, "decode_name")
    expect_equal(unnamed.hello.seen[0].decode_name, "", "decode_name where any D will do")


@case(103, "Layouts P can send, best first; at least one.")
async def hello_offers_its_layout(p: PrefillHand) -> None:
    """Hello offers the layout that GetModelInfo tells."""
    d = await p.decode()
    await p.call(p.request(), d).handed_off()
    layouts = list(d.hello.seen[0].layouts)
    expect(p.subject.info.layout in layouts, "the layout of GetModelInfo among them", layouts)


@case(104, "The standing conversation of one P with one D; one per pair, without a deadline.")
async def one_session_for_all(p: PrefillHand) -> None:
    """Four requests at once for one D share a session."""
    d = await p.decode()
    for caller in [p.call(p.request(), d) for _ in range(4)]:
        await caller.handed_off()
    expect_equal(len(d.hello.seen), 1, "the number of sessions")


async def _every_call(p: PrefillHand, d: KitDecode) -> list[Any]:
    """What P sends for a transfer: Allocates, opens of a Transfer, SendFirstTokens, Releases."""
    await p.call(p.request(), d).handed_off()
    d.allocate.hold()
    caller = p.call(p.request(), d)
    await d.allocate.came("the second Allocate", 2)
    await caller.leave()
    await d.release.came("Release")
    return [*d.allocate.seen, *d.kv.open.seen, *d.first_token.seen, *d.release.seen]


@case(105, "Minted by D, never empty; every call of P's carries it.")
async def calls_carry_the_session(p: PrefillHand) -> None:
    """Allocate, Transfer, SendFirstToken and Release all carry the session_id of Welcome."""
    d = await p.decode()
    carried = {call.session_id for call in await _every_call(p, d)}
    expect_equal(carried, {d.session.session_id}, "the session ids of its calls")


@case(
    106,
    "Allocate, SendFirstToken, Release and Transfer carry the epoch of their session's Welcome.",
)
async def calls_carry_the_epoch(p: PrefillHand) -> None:
    """A request whose ref has decode_epoch 0 reaches D with the epoch of its Welcome."""
    d = await p.decode()
    carried = {call.ref.decode_epoch for call in await _every_call(p, d)}
    expect_equal(carried, {d.instance.epoch}, "the epochs of its calls")


@case(107, "Time between two heartbeats of P.")
async def heartbeats_keep_their_time(p: PrefillHand) -> None:
    """Heartbeats come as often as Welcome says, neither much later nor without end."""
    d = await p.decode(QUICK)
    await p.call(p.request(), d).handed_off()
    session = d.session
    before = len(session.heartbeats)
    wait = 4 * d.times.heartbeat
    await asyncio.sleep(wait)
    beats = len(session.heartbeats) - before
    expect(2 <= beats <= 6, f"some 4 heartbeats in {wait:g} s", beats)


@case(108, "Counts from 1 within the session.")
async def heartbeats_count(p: PrefillHand) -> None:
    """The heartbeats of a session are numbered 1 and 2, and those of the next one again."""
    d = await p.decode(QUICK)
    d.kv.chunk.hold()
    caller = p.call(p.request(), d)
    for number in (1, 2):
        session = await d.joined(number)
        await session.heartbeat("two heartbeats", 2)
        sequences = [beat.sequence for beat in session.heartbeats[:2]]
        expect_equal(sequences, [1, 2], "the sequences")
        session.end(CONNECTION_LOST)
    await d.joined(3)
    d.go()
    await caller.handed_off()


@case(109, "Every grant P holds.")
async def heartbeats_list_grants(p: PrefillHand) -> None:
    """Heartbeats list two grants that are held, and one of them no longer once it is given back."""
    d = await p.decode(QUICK)
    d.kv.chunk.hold()
    kept, left = p.request(), p.request()
    caller, leaving = p.call(kept, d), p.call(left, d)
    first, second = await d.granted(kept.ref), await d.granted(left.ref)
    await d.session.lists([first.grant_id, second.grant_id], "a heartbeat that lists both grants")
    await leaving.leave()
    await d.session.lists([first.grant_id], "a heartbeat that lists the one still held")
    d.go()
    await caller.handed_off()


@case(110, "After hand-off P's lease, session, epoch and Release no longer touch the transfer")
async def handed_off_is_let_go(p: PrefillHand) -> None:
    """After the hand-off neither heartbeats nor Release name the transfer any more."""
    d = await p.decode(QUICK)
    await p.call(p.request(), d).handed_off()
    beats = len(d.session.heartbeats)
    # The one that was under way may list it still.
    last = await d.session.heartbeat("heartbeats after the hand-off", beats + 2)
    expect_equal(list(last.grant_ids), [], "the grants of the last heartbeat")
    expect_equal(d.release.seen, [], "the Releases")


@case(
    111,
    "Each side takes a session on which it has heard nothing for two of them for broken.",
)
async def silence_breaks_a_session(p: PrefillHand) -> None:
    """D stops acknowledging heartbeats; P opens another session and goes on with its grant."""
    d = await p.decode(QUICK)
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.granted(request.ref)
    d.session.acks = False
    await d.joined(2, 2 * d.times.heartbeat + answer_s())
    d.go()
    await caller.handed_off()
    expect_equal(len(d.allocate.seen), 1, "the number of Allocates")


@case(112, "a new session of the same epoch takes them over.")
async def a_new_session_takes_over(p: PrefillHand) -> None:
    """The session breaks twice, without a word and with LEASE_EXPIRED; P comes back as the same
    process, lists its grant and hands over."""
    d = await p.decode()
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    grant = await d.granted(request.ref)
    for number, end in (
        (2, CONNECTION_LOST),
        (3, Fault(Reason.LEASE_EXPIRED, "P was silent")),
    ):
        d.session.end(end)
        session = await d.joined(number)
        expect_equal(session.hello.instance, d.hello.seen[0].instance, "the instance")
        await session.lists([grant.grant_id], "a heartbeat that lists the grant")
    d.go()
    await caller.handed_off()
    expect_equal(len(d.allocate.seen), 1, "the number of Allocates")


@case(
    113,
    "UNAVAILABLE with DRAINING while P drains, with ENGINE_STUCK or SENDER_STUCK while it"
    " makes no progress, with DECODE_LOST when D is lost before the hand-off.",
)
async def a_decode_that_stays_away(p: PrefillHand) -> None:
    """The session breaks and D takes no other; when grace is over the caller hears DECODE_LOST."""
    d = await p.decode(QUICK)
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.granted(request.ref)
    d.hello.hold()
    d.session.end(CONNECTION_LOST)
    await caller.fails(Reason.DECODE_LOST, "D did not come back", d.times.grace + answer_s())


@case(114, "Of two instances of one name the greater epoch supersedes")
async def a_decode_that_restarts(p: PrefillHand) -> None:
    """D comes back as a new process: the caller of its predecessor's grant hears DECODE_LOST, or
    STALE_EPOCH from the new one, which the next request reaches by its own epoch."""
    d = await p.decode()
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.granted(request.ref)
    await d.restart(new_epoch())
    ended = await caller.ends(d.times.grace + answer_s())
    gone = isinstance(ended, Fault) and ended.reason in (Reason.DECODE_LOST, Reason.STALE_EPOCH)
    expect(gone, "DECODE_LOST or STALE_EPOCH: D's predecessor is gone", str(ended))
    d.go()
    after = p.request()
    handed = await p.call(after, d).handed_off()
    expect_equal(handed.decode, d.instance, "handed_off.decode")
    expect_equal(d.allocate.seen[-1].ref.decode_epoch, d.instance.epoch, "decode_epoch")


@case(115, "P ends a session whose layout is another.")
async def a_layout_not_offered(p: PrefillHand) -> None:
    """A Welcome that chooses another block size ends the session, and the caller hears which field
    differs."""
    d = await p.decode()
    other = decode_pb2.Welcome(layout=p.subject.info.layout).layout
    other.block_size = p.block_size % 1024 + 1
    d.hello.answer["layout"] = other
    fault = await p.call(p.request(), d).fails(Reason.LAYOUT_MISMATCH, "the layout differs")
    expect({"field", "ours", "theirs"} <= fault.metadata.keys(), "field and both", fault.metadata)
    expect("block_size" in fault.metadata["field"], "the field block_size", fault.metadata)
    await d.session.ended("the end of the session")
    expect_equal(d.allocate.seen, [], "the Allocates")


@case(
    116,
    "Reserved, false in v1: D samples the first token itself; SendFirstToken then only completes"
    " the hand-over.",
)
async def a_welcome_with_a_reserved_feature(p: PrefillHand) -> None:
    """A Welcome that says first_token_by_decode is refused by name."""
    d = await p.decode()
    d.hello.answer["first_token_by_decode"] = True
    fault = await p.call(p.request(), d).fails(Reason.FEATURE, "a reserved feature")
    check_feature(fault, "welcome.first_token_by_decode")
    expect_equal(d.allocate.seen, [], "the Allocates")


@case(117, "D leaves on purpose.")
async def goodbye_of_a_decode(p: PrefillHand) -> None:
    """D says goodbye: the caller of a grant hears DECODE_LOST at once, and the next request finds
    D again."""
    d = await p.decode(KitTimes(heartbeat=2 * answer_s(), grace=2 * answer_s()))
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.granted(request.ref)
    d.session.say(goodbye=decode_pb2.Goodbye(reason="leaving"))
    d.session.end()
    await caller.fails(Reason.DECODE_LOST, "D has left")
    d.go()
    await p.call(p.request(), d).handed_off()


@case(
    118,
    "A message of a stream that has none of the known members is ignored by whoever reads a Session"
    " after its first message, or an answer",
)
async def unknown_session_messages(p: PrefillHand) -> None:
    """Messages of a later version on the session and in Transfer change nothing."""
    d = await p.decode(QUICK)
    d.kv.chunk.hold()
    request = p.request()
    caller = p.call(request, d)
    await d.granted(request.ref)
    d.session.say_message(later(decode_pb2.SessionResponse()))
    beats = len(d.session.heartbeats)
    await d.session.heartbeat("two more heartbeats", beats + 2)
    d.go()
    await caller.handed_off()
    expect_equal(len(d.hello.seen), 1, "the number of sessions")
