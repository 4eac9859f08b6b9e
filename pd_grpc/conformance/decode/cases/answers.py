"""D46x: what a client is shown of an answer that D decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver, granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.request import Request
from pd_grpc.v1 import sampling_pb2, types_pb2

BLOCKS = "block b holds the tokens at positions [b * block_size, (b + 1) * block_size)."
ALIKE = (
    "A sampled token is a pure function of the logits, the tokens before it, the seed and its"
    " position, so P, D and an "
    "aggregated server choose alike."
)


@case(460, BLOCKS)
async def prompts_around_a_block(d: DecodeHand) -> None:
    """Prompts of one token, around one block and of several blocks have the right answer."""
    d.needs_blocks(5)
    size = d.block_size
    for tokens in sorted({1, max(1, size - 1), size, size + 1, 4 * size}):
        await _rightly(d, d.request(tokens))


@case(461, BLOCKS)
async def an_answer_of_several_blocks(d: DecodeHand) -> None:
    """The answer fills more than two blocks, and every token is right."""
    d.needs_blocks(4)
    await _rightly(d, d.request(sampling=_greedy(2 * d.block_size + 1, ignore_eos=True)))


@case(462, ALIKE)
async def sampled_answers(d: DecodeHand) -> None:
    """Answers with seed, temperature, top_p and top_k are those of the aggregated mode's rule."""
    variants: tuple[dict[str, Any], ...] = (
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.3, "top_p": 0.9, "seed": 2**63},
        {"top_k": 50, "seed": 3},
    )
    for fields in variants:
        sampling = sampling_pb2.SamplingParams(max_tokens=6, **fields)
        await _rightly(d, d.request(sampling=sampling))


@case(463, "Token ids that end the answer; the token itself is part of token_ids.")
async def stop_ids(d: DecodeHand) -> None:
    """The third token of an answer is made a stop id; the answer ends with it."""
    request = d.request(sampling=_greedy(8, ignore_eos=True))
    third = d.answer(request)[2]
    request.sampling.stop_token_ids.append(third)
    h = await _handed_over(d, request)
    expect_equal(h.leg.last.finish_reason, types_pb2.FINISH_REASON_STOP, "finish_reason")


@case(
    464, "End-of-sequence, stop ids and stop strings do not end the answer before this many tokens"
)
async def min_tokens(d: DecodeHand) -> None:
    """The second token of an answer is made a stop id that counts from the fifth token on."""
    request = d.request(sampling=_greedy(8, ignore_eos=True))
    second = d.answer(request)[1]
    request.sampling.stop_token_ids.append(second)
    request.sampling.min_tokens = 4
    await _handed_over(d, request)


@case(465, "Most tokens of the answer, generated_token_ids included; at least 1.")
async def max_tokens(d: DecodeHand) -> None:
    """Answers of one, two and three tokens are as long as that."""
    for tokens in (1, 2, 3):
        h = await granted(d, d.request(sampling=_greedy(tokens, ignore_eos=True)))
        state = await h.first_token()
        if state != types_pb2.TRANSFER_STATE_FINISHED:
            await h.send_kv()
        await h.answers()
        expect_equal(len(h.leg.tokens), tokens, "the number of tokens")
        expect_equal(h.leg.last.finish_reason, types_pb2.FINISH_REASON_LENGTH, "finish_reason")


@case(466, "Counts as output and not as prompt, and is never emitted again.")
async def an_answer_that_goes_on(d: DecodeHand) -> None:
    """The client has the first three tokens already, and is shown the rest of the same answer."""
    whole = d.request(sampling=_greedy(8, ignore_eos=True))
    answer = d.answer(whole)
    rest = d.request(prompt=whole.prompt, sampling=whole.sampling, generated=answer[:3])
    h = await _handed_over(d, rest)
    expect_equal(h.leg.tokens, answer[3:], "the tokens")


@case(467, "Tokens of the answer, generated_token_ids included.")
async def usage(d: DecodeHand) -> None:
    """The last message counts the prompt's tokens and the answer's, with those given before."""
    request = d.request(sampling=_greedy(8, ignore_eos=True))
    request.generated = d.output(request, 2)
    h = await _handed_over(d, request)
    used = h.leg.last.usage
    expect_equal(used.prompt_tokens, len(request.prompt), "usage.prompt_tokens")
    expect_equal(used.completion_tokens, 8, "usage.completion_tokens")


@case(468, "Set on the last message, and only there: an answer without it is not complete.")
async def the_finish_reason_comes_last(d: DecodeHand) -> None:
    """The last message has a finish_reason and no other has."""
    h = await _handed_over(d, d.request())
    reasons = [message.finish_reason for message in h.leg.messages]
    expect(reasons[-1] != types_pb2.FINISH_REASON_UNSPECIFIED, "one on the last", reasons)
    expect(not any(reasons[:-1]), "none on those before", reasons)


@case(469, "Set on the last message: name of the instance that decoded.")
async def the_decode_instance_is_named(d: DecodeHand) -> None:
    """The last message names D."""
    h = await _handed_over(d, d.request())
    expect_equal(h.leg.last.decode_instance, d.subject.instance.name, "decode_instance")


@case(470, "New tokens; may be empty in the last message.")
async def no_message_is_empty(d: DecodeHand) -> None:
    """Every message but the last has tokens."""
    h = await _handed_over(d, d.request())
    counts: Sequence[int] = [len(message.token_ids) for message in h.leg.messages]
    expect(all(counts[:-1]), "tokens in every message before the last", counts)


async def _handed_over(d: DecodeHand, request: Request) -> HandOver:
    """A request that has been answered."""
    h = await granted(d, request)
    await h.completes()
    return h


async def _rightly(d: DecodeHand, request: Request) -> HandOver:
    """A request whose answer is known and was right to its last token."""
    d.answer(request)
    return await _handed_over(d, request)


def _greedy(tokens: int, **fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=tokens, temperature=0, **fields)
