"""D20x: what a grant has, what it is asked with, and asking again."""

from __future__ import annotations

from typing import Any

from pd_grpc.conformance.calls import check_field, check_metadata
from pd_grpc.conformance.case import NotApplicable, answer_s, expect, expect_equal, soon_s
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.pool import fill, request_of, wait_in_queue
from pd_grpc.conformance.decode.prefill import wanted_blocks
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request, prompt_of
from pd_grpc.protocol.faults import Fault, Reason, read_status
from pd_grpc.protocol.messages import INLINE, duration, seconds
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2


@case(200, "Logical blocks D wants, of every group;")
async def every_block_of_a_cold_prompt(d: DecodeHand) -> None:
    """Prompts never sent before, of lengths around whole blocks: every block is wanted."""
    d.needs_blocks(4)
    p = await d.prefill()
    size = d.block_size
    for tokens in sorted({1, max(1, size - 1), size, size + 1, 3 * size, 3 * size + 1}):
        request = d.request(tokens)
        grant = await p.allocate(request)
        whole = [*range(-(-tokens // size))]
        expect_equal(sorted(wanted_blocks(grant.wanted)), whole, f"the blocks of {tokens} tokens")
        expect_equal(grant.cached_tokens, 0, "cached_tokens")
        await p.release(request)


@case(201, "Minted by D, never empty; heartbeats and transfers name it.")
async def a_grant_has_a_name_of_its_own(d: DecodeHand) -> None:
    """Two grants, and a third for a later attempt of the first: all their ids differ."""
    d.needs_blocks(4)
    p = await d.prefill()
    first, second = d.request(), d.request()
    ids = [(await p.allocate(r)).grant_id for r in (first, second)]
    await p.release(first)
    first.attempt += 1
    ids.append((await p.allocate(first)).grant_id)
    expect(all(ids) and len({*ids}) == len(ids), "three grant ids, all different", ids)


@case(202, "Life of the grant unless renewed; above 0.")
async def a_grant_says_where_and_how_long(d: DecodeHand) -> None:
    """A grant has a lease, a transport, and shards that welcome listed."""
    p = await d.prefill()
    grant = await p.allocate(d.request())
    expect(seconds(grant.lease) > 0, "a lease above 0", grant)
    known = {shard.endpoint for shard in p.welcome.shards}
    expect(bool(grant.shards), "at least one shard", grant)
    for shard in grant.shards:
        expect(shard.endpoint in known, f"a shard of welcome, one of {known}", shard)
    expect(grant.transport in INLINE, "transport INLINE", grant)


@case(203, "Any other process of D refuses it with FAILED_PRECONDITION, STALE_EPOCH.")
async def a_ref_of_another_process(d: DecodeHand) -> None:
    """Allocate for another epoch of D, and for none, is refused with both epochs."""
    p = await d.prefill()
    here = d.subject.instance.epoch
    for epoch in (here - 1, here + 1, 0):
        request = d.request(decode_epoch=epoch)
        fault = await p.allocate_refused(request, Reason.STALE_EPOCH, f"epoch {epoch}")
        check_metadata(fault, meant=epoch, here=here)


@case(204, "1 to 128 characters of [A-Za-z0-9._:-], unique for ever")
async def a_malformed_transfer_id(d: DecodeHand) -> None:
    """A transfer_id that is empty, too long or has another character is refused; 128 are not."""
    p = await d.prefill()
    for name in ("", "t" * 129, "a b", "a/b", "ü", "a\n"):
        fault = await _refused(d, ref=_ref(d, transfer_id=name))
        check_field(fault, "transfer_id")
    letters = d.request().transfer_id + "-AZaz09._:-"
    await p.allocate(d.request(transfer_id=letters.ljust(128, "x")))


@case(205, "Counts from 1; 0 is refused.")
async def attempt_zero(d: DecodeHand) -> None:
    """Attempt 0 is refused."""
    check_field(await _refused(d, ref=_ref(d, attempt=0)), "attempt")


@case(206, "Tokens whose KV P will send: prompt and generated_token_ids; at least 1.")
async def no_prompt(d: DecodeHand) -> None:
    """A prompt of no tokens is refused."""
    check_field(await _refused(d, prompt_tokens=0), "prompt_tokens")


@case(207, "Tokens that may still be generated, the first included; at least 1.")
async def no_output(d: DecodeHand) -> None:
    """An output of no tokens is refused."""
    check_field(await _refused(d, max_new_tokens=0), "max_new_tokens")


@case(
    208,
    "SHA-256 over the tokens as little-endian uint32 (prompt, then generated), then adapter id"
    " and media hashes where there are any; 32 bytes.",
)
async def a_digest_of_another_size(d: DecodeHand) -> None:
    """A digest that is missing, of 31 bytes or of 33 is refused."""
    for size in (0, 31, 33):
        check_field(await _refused(d, prompt_digest=b"x" * size), "prompt_digest")


@case(209, "The client's name for the request, up to 128 characters, for people; never a key.")
async def a_name_for_people(d: DecodeHand) -> None:
    """A request_id of 129 characters is refused; two requests may share one of 128."""
    d.needs_blocks(4)
    p = await d.prefill()
    check_field(await _refused(d, request_id="r" * 129), "request_id")
    for _ in range(2):
        await p.allocate(d.request(request_id="r" * 128))


@case(210, "a field is malformed, empty or out of its bounds; the prompt is longer than the model")
async def a_prompt_longer_than_the_model(d: DecodeHand) -> None:
    """A prompt of one token more than the model takes is refused."""
    longest = d.subject.info.max_model_len
    if not longest:
        raise NotApplicable("D announces no max_model_len")
    check_field(await _refused(d, prompt_tokens=longest + 1), "prompt_tokens")


@case(211, "INVALID_ARGUMENT with TOO_LARGE when it could never fit")
async def larger_than_the_pool(d: DecodeHand) -> None:
    """Prompt and output that fill the pool or the model are granted; one token more is not."""
    p = await d.prefill()
    room = d.subject.room_tokens
    output = max(1, d.block_size // 2)
    request = _of_length(d, room - output, output)
    await p.allocate(request)
    await p.release(request)
    request = _of_length(d, room - output + 1, output)
    fault = await p.allocate_refused(request, Reason.TOO_LARGE, f"{room + 1} tokens")
    needed, total = (fault.metadata.get(key, "") for key in ("needed", "total"))
    expect(needed.isdecimal() and total.isdecimal(), "needed and total", dict(fault.metadata))
    expect(int(needed) > int(total), "more needed than there is in total", dict(fault.metadata))


@case(
    212,
    "Idempotent: the same body without session_id, max_wait and budget gets the same answer,"
    " and repeated calls wait together, each for its own max_wait.",
)
async def asking_again(d: DecodeHand) -> None:
    """The same Allocate, with another max_wait and budget and in a newer session: same answer."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    again = await p.allocate(request, max_wait=duration(1), budget=duration(50))
    expect_equal(again, grant, "the answer to the same body,")
    await p.join()
    again = await p.allocate(request, max_wait=None)
    expect_equal(again, grant, "the answer to the same body in a newer session,")


@case(
    213,
    "ALREADY_EXISTS with DUPLICATE_TRANSFER for another body while the ref is in flight, which"
    " is unharmed",
)
async def another_body(d: DecodeHand) -> None:
    """The same ref with a body that differs in one field is refused; the first comes to its end."""
    p = await d.prefill()
    request = d.request()
    leg = d.generate(request)
    grant = await p.allocate(request)
    other = sampling_pb2.SamplingParams()
    other.CopyFrom(request.sampling)
    other.seed += 1
    bodies: list[dict[str, Any]] = [
        {"prompt_tokens": len(request.prompt) - 1},
        {"prompt_digest": b"x" * 32},
        {"sampling": other},
        {"kv_needed": False},
        {"block_hashes": [decode_pb2.BlockHash(hash=b"h" * 16)]},
    ]
    for body in bodies:
        await p.allocate_refused(request, Reason.DUPLICATE_TRANSFER, "another body", **body)
    await HandOver(d, p, request, grant, leg).completes()


@case(214, "0 is over already, STAGE_DEADLINE.")
async def no_budget(d: DecodeHand) -> None:
    """An Allocate whose budget is 0 is refused in the stage "allocate", and costs no blocks."""
    p = await d.prefill()
    request = d.request()
    fault = await p.allocate_refused(request, Reason.STAGE_DEADLINE, "budget 0", budget=duration(0))
    check_metadata(fault, stage="allocate")
    load = await p.load_now()
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")


@case(215, "A repeated call only shortens it.")
async def asking_again_with_less_budget(d: DecodeHand) -> None:
    """A granted Allocate is repeated with less budget, then with more: the less counts."""
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    short = soon_s()
    await p.allocate(request, budget=duration(short))
    await p.allocate(request, budget=duration(60))
    ended = await p.told_of(request, f"the end of {grant.grant_id}", short + answer_s())
    fault = read_status(ended.status)
    expect(
        isinstance(fault, Fault) and fault.reason is Reason.STAGE_DEADLINE,
        "a status with STAGE_DEADLINE",
        fault,
    )


@case(
    216,
    "False when the first token is sure to end the answer, for example with max_tokens 1:"
    " granted at once, without blocks and without Transfer.",
)
async def no_kv_needed(d: DecodeHand) -> None:
    """Without kv_needed a grant wants nothing, takes no blocks, and the first token ends it."""
    p = await d.prefill()
    request = d.request(sampling=sampling_pb2.SamplingParams(max_tokens=1, temperature=0))
    leg = d.generate(request)
    grant = await p.allocate(request, kv_needed=False)
    expect(not grant.wanted and not grant.shards, "no blocks wanted and no shards", grant)
    load = await p.load_now()
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")
    token = d.first_token(request)
    finished = types_pb2.FINISH_REASON_LENGTH
    state = await p.first_token(request, grant, token, finish_reason=finished)
    expect_equal(state, types_pb2.TRANSFER_STATE_FINISHED, "state")
    await leg.answers([token])


@case(217, "granted at once, without blocks and without Transfer.")
async def no_kv_needed_when_the_pool_is_full(d: DecodeHand) -> None:
    """Without kv_needed nothing waits: not for blocks, and not behind one that waits for them."""
    p = await d.prefill()
    await fill(d, p)
    waiting = await wait_in_queue(p, request_of(d, 1), 0)
    grant = await p.allocate(d.request(), kv_needed=False, max_wait=None)
    expect(not grant.wanted, "a grant that wants no blocks", grant)
    waiting.cancel()


@case(218, "Where it has kept KV of the same name it wants these blocks no more:")
async def block_hashes_of_an_unknown_prompt(d: DecodeHand) -> None:
    """Hashes of blocks that D has never seen bring nothing: every block is wanted."""
    p = await d.prefill()
    d.needs_blocks(4)
    request = d.request(3 * d.block_size)
    hashes = [decode_pb2.BlockHash(hash=bytes([n]) * 16) for n in range(3)]
    grant = await p.allocate(request, block_hashes=hashes)
    expect_equal(sorted(wanted_blocks(grant.wanted)), [0, 1, 2], "the blocks wanted")


@case(219, "Unset means D's default; 0 is over already, STAGE_DEADLINE.")
async def a_budget_left_to_the_decode_instance(d: DecodeHand) -> None:
    """Allocate without a budget is granted."""
    p = await d.prefill()
    await p.allocate(d.request(), budget=None)


def _ref(d: DecodeHand, **fields: Any) -> types_pb2.TransferRef:
    """A new ref but for these fields."""
    ref = d.request().ref
    for name, value in fields.items():
        setattr(ref, name, value)
    return ref


def _of_length(d: DecodeHand, prompt: int, output: int) -> Request:
    """A request of so many tokens of prompt and output."""
    tokens = prompt_of(d.name("prompt"), prompt, d.subject.info.vocab_size)
    sampling = sampling_pb2.SamplingParams(max_tokens=output, temperature=0)
    return d.request(prompt=tokens, sampling=sampling)


async def _refused(d: DecodeHand, **fields: Any) -> Fault:
    """The fault of an Allocate with these fields instead of the right ones."""
    p = await d.prefill()
    return await p.allocate_refused(d.request(), Reason.BAD_REQUEST, f"{[*fields]}", **fields)
