"""P4xx: the first token, the hand-off, and what the caller is told on the way."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal, quiet_s
from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import KitDecode
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.messages import seconds
from pd_grpc.v1 import sampling_pb2, types_pb2

ALLOCATE_TAKES_S = 0.1
"""How long D takes for an Allocate whose time must show."""

HAND_OFF = (
    "Hand-off is the moment D holds both the verified KV and the first token, whichever comes last."
)
ENDS_THE_ANSWER = "Set when the token ends the answer; KV is then no longer needed."


@case(401, "P sends it as soon as it is known.")
async def the_first_token_waits_for_no_kv(p: PrefillHand) -> None:
    """D acknowledges no KV; the first token comes all the same."""
    d = await p.decode()
    d.kv.chunk.hold()
    caller = p.call(p.request(), d)
    await d.first_token.came("the first token before the KV is acknowledged")
    d.go()
    await caller.handed_off()


@case(402, "The token, below the vocabulary's size.")
async def the_first_token_is_right(p: PrefillHand) -> None:
    """The first token of a prompt, and the next one of an answer that is continued, are the right
    ones by the sim's rule where P follows it."""
    d = await p.decode()
    for request in (p.request(), p.request(p.blocks(5) - p.block_size, generated=p.tokens(2))):
        await p.call(request, d).handed_off()
        p.check_first_token(request, d)


@case(403, "The grant it belongs to, from AllocateResponse.")
async def the_first_token_names_its_grant(p: PrefillHand) -> None:
    """SendFirstToken names transfer and grant, and says how many tokens P computed, not more than
    there are."""
    d = await p.decode()
    for request in (p.request(), p.request()):
        await p.call(request, d).handed_off()
        said = d.first_token.seen[-1]
        grant = await d.granted(request.ref)
        expect_equal(said.grant_id, grant.grant_id, "grant_id")
        expect_equal(said.ref.transfer_id, request.transfer_id, "ref.transfer_id")
        expect(said.computed_tokens <= len(request.tokens), "computed_tokens within them", said)


@case(404, "Exactly one in v1; one per sibling when that is built.")
async def one_first_token(p: PrefillHand) -> None:
    """SendFirstToken carries one token, of sibling 0, that does not end the answer."""
    d = await p.decode()
    await p.call(p.request(), d).handed_off()
    expect_equal(len(d.first_token.seen), 1, "the number of SendFirstTokens")
    said = d.first_token.seen[0]
    expect_equal(len(said.tokens), 1, "the number of tokens")
    expect_equal(said.tokens[0].sibling, 0, "sibling")
    unset = types_pb2.FINISH_REASON_UNSPECIFIED
    expect_equal(said.tokens[0].finish_reason, unset, "finish_reason")


@case(405, "The first token must then carry its finish_reason.")
async def the_only_token_ends_by_length(p: PrefillHand) -> None:
    """With max_tokens 1 the first token has the finish_reason LENGTH."""
    d = await p.decode()
    one = sampling_pb2.SamplingParams(max_tokens=1, temperature=0)
    await p.call(p.request(sampling=one), d).handed_off()
    finish = d.token.finish_reason
    expect_equal(finish, types_pb2.FINISH_REASON_LENGTH, "finish_reason")


@case(406, ENDS_THE_ANSWER)
async def a_stop_token_ends_by_stop(p: PrefillHand) -> None:
    """The first token is one of stop_token_ids: it has the finish_reason STOP, and P hands over
    though D has verified no KV."""
    request = p.request()
    token = await p.first_token(request)
    stopping = sampling_pb2.SamplingParams()
    stopping.CopyFrom(request.sampling)
    stopping.stop_token_ids.append(token)
    d = await p.decode()
    d.kv.chunk.hold()
    await p.call(p.request(prompt=request.prompt, sampling=stopping), d).handed_off()
    said = d.token
    expect_equal(said.token_id, token, "the first token")
    expect_equal(said.finish_reason, types_pb2.FINISH_REASON_STOP, "finish_reason")


@case(
    407,
    "A sampled token is a pure function of the logits, the tokens before it, the seed and its"
    " position, so P, D and"
    " an aggregated server choose alike.",
)
async def equal_seeds_choose_alike(p: PrefillHand) -> None:
    """The same prompt with the same seed, twice, gives the same first token; and by the sim's rule,
    where P follows it, the right one."""
    d = await p.decode()
    drawn = sampling_pb2.SamplingParams(max_tokens=8, temperature=1.5, top_p=0.9, seed=2**63 + 1)
    prompt = p.request().prompt
    tokens = []
    for _ in range(2):
        request = p.request(prompt=prompt, sampling=drawn)
        await p.call(request, d).handed_off()
        p.check_first_token(request, d)
        tokens.append(d.token.token_id)
    expect_equal(tokens[1], tokens[0], "the second first token")


@case(410, HAND_OFF)
async def no_hand_off_without_kv(p: PrefillHand) -> None:
    """D has the first token and has not verified the KV: no hand-off yet."""
    d = await p.decode()
    d.kv.chunk.hold()
    caller = p.call(p.request(), d)
    await d.first_token.came("the first token")
    await caller.no_hand_off(quiet_s(), "D has not verified the KV")
    d.go()
    await caller.handed_off()


@case(411, HAND_OFF)
async def no_hand_off_without_first_token(p: PrefillHand) -> None:
    """D has all KV and has not answered the first token: no hand-off yet."""
    d = await p.decode()
    d.first_token.hold()
    caller = p.call(p.request(), d)
    await d.first_token.came("the first token")
    await d.kv.end.came("end")
    await caller.no_hand_off(quiet_s(), "D has not taken the first token")
    d.go()
    await caller.handed_off()


@case(412, "FINISHED that the answer is complete; any other of D's that it has.")
async def every_state_of_a_live_transfer(p: PrefillHand) -> None:
    """D answers the first token with each state of a live transfer: each leads to the hand-off,
    FINISHED without waiting for the KV."""
    states = types_pb2
    d = await p.decode()
    for state in (
        states.TRANSFER_STATE_RESERVED,
        states.TRANSFER_STATE_RECEIVING,
        states.TRANSFER_STATE_READY,
        states.TRANSFER_STATE_DECODING,
        states.TRANSFER_STATE_PREEMPTED,
    ):
        d.first_token.answer["state"] = state
        await p.call(p.request(), d).handed_off()
    d.first_token.answer["state"] = states.TRANSFER_STATE_FINISHED
    d.kv.chunk.hold()
    await p.call(p.request(), d).handed_off()


@case(413, "FAILED, RELEASED and EXPIRED mean that D has not taken it;")
async def states_of_an_ended_transfer(p: PrefillHand) -> None:
    """D answers the first token with each state of a transfer that has ended: the caller hears a
    fault and of no hand-off."""
    d = await p.decode()
    for state in (
        types_pb2.TRANSFER_STATE_FAILED,
        types_pb2.TRANSFER_STATE_RELEASED,
        types_pb2.TRANSFER_STATE_EXPIRED,
    ):
        d.first_token.answer["state"] = state
        await _no_hand_off(p, d, f"D answered {types_pb2.TransferState.Name(state)}")


@case(414, "In an answer, P takes a state that it does not know for no hand-over.")
async def states_of_a_later_version(p: PrefillHand) -> None:
    """D answers the first token with a state of a later version, or with none."""
    d = await p.decode()
    for state in (UNKNOWN_VALUE, types_pb2.TRANSFER_STATE_UNSPECIFIED):
        d.first_token.answer["state"] = state
        await _no_hand_off(p, d, f"D answered state {state}")


@case(420, "It is waiting to be prepared. The first message.")
async def queued_comes_first(p: PrefillHand) -> None:
    """The first event is queued, though D has not answered Hello yet, and it comes once."""
    d = await p.decode()
    d.hello.hold()
    caller = p.call(p.request(), d)
    await caller.event("queued")
    expect_equal(caller.kinds, ["queued"], "the events")
    d.go()
    await caller.handed_off()
    expect_equal(caller.kinds.count("queued"), 1, "the number of queued")


@case(421, "Tokens computed so far, of prompt and generated_token_ids.")
async def progress_rises_to_the_whole(p: PrefillHand) -> None:
    """Progress rises from event to event, up to all tokens of prompt and output so far."""
    d = await p.decode()
    request = p.request(p.blocks(15) - p.block_size, generated=p.tokens(3))
    caller = p.call(request, d)
    await caller.handed_off()
    computed = [e.progress.computed_tokens for e in caller.events if e.HasField("progress")]
    expect(bool(computed), "progress", caller.kinds)
    expect(computed == sorted(set(computed)), "numbers that rise", computed)
    expect_equal(computed[-1], len(request.tokens), "the last computed_tokens")


@case(422, "D has it. The last message.")
async def handed_off_comes_last(p: PrefillHand) -> None:
    """The last event is handed_off, which comes once; then the call ends with OK."""
    d = await p.decode()
    caller = p.call(p.request(), d)
    await caller.handed_off()
    expect_equal(caller.kinds[-1], "handed_off", "the last event")
    expect_equal(caller.kinds.count("handed_off"), 1, "the number of handed_off")


@case(423, "Who has it, as its Welcome said.")
async def handed_off_names_the_decode(p: PrefillHand) -> None:
    """The last event names D with name, epoch and role."""
    d = await p.decode()
    handed = await p.call(p.request(), d.endpoint).handed_off()
    expect_equal(handed.decode, d.instance, "handed_off.decode")


@case(424, "Token counts as of the first token, which is counted.")
async def usage_as_of_the_first_token(p: PrefillHand) -> None:
    """Output so far counts as output: three tokens and the first one are four."""
    d = await p.decode()
    request = p.request(generated=p.tokens(3))
    usage = (await p.call(request, d).handed_off()).usage
    expect_equal(usage.prompt_tokens, len(request.prompt), "prompt_tokens")
    expect_equal(usage.completion_tokens, 4, "completion_tokens")


@case(425, "On P: from the first Allocate until the grant.")
async def timings_tell_where_the_time_went(p: PrefillHand) -> None:
    """D takes its time for Allocate: prepare and allocate are at least as long, and what is the
    router's to tell is unset."""
    d = await p.decode()
    await p.call(p.request(), d).handed_off()
    d.allocate.hold()
    caller = p.call(p.request(), d)
    await d.allocate.came("Allocate", 2)
    await caller.no_hand_off(ALLOCATE_TAKES_S, "D has granted nothing")
    d.go()
    timings = (await caller.handed_off()).timings
    for name in ("prepare", "allocate"):
        took = seconds(getattr(timings, name))
        expect(took >= ALLOCATE_TAKES_S, f"{name} of {ALLOCATE_TAKES_S:g} s at least", took)
    for name in ("route", "total"):
        expect(not timings.HasField(name), f"no {name}, which is the router's", timings)


async def _no_hand_off(p: PrefillHand, d: KitDecode, why: str) -> None:
    before = len(d.first_token.seen)
    caller = p.call(p.request(), d)
    ended = await caller.ends()
    expect(len(d.first_token.seen) > before, "a first token that D answers", str(ended))
    expect(isinstance(ended, Fault), f"a fault: {why}", "OK" if ended is None else str(ended))
    expect("handed_off" not in caller.kinds, f"no handed_off: {why}", caller.kinds)
