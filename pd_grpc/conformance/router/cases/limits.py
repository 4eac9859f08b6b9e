"""R82x: messages at their limits."""

from __future__ import annotations

from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.instance import MODEL
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.v1 import inference_pb2, sampling_pb2

ANSWER = [901, 902, 903]
MILLION = 1_000_000
LARGE = 20_000


@case(821, "At least one, each below the vocabulary's size; packed, up to a million.")
async def a_prompt_of_a_million_tokens(r: RouterHand) -> None:
    """A prompt of a million tokens reaches both legs whole."""
    vocab = MODEL.vocab_size
    ids = [vocab - 1 - n % 1000 for n in range(MILLION)]
    one = await r.routed(token_ids=inference_pb2.TokenIds(ids=ids))
    # Compared here, as a million numbers explain nothing.
    expect(list(one.prefill.request.token_ids) == ids, "the prompt on Prefill", "another")
    expect(list(one.decode.request.token_ids.ids) == ids, "the prompt on Generate", "another")
    await one.finish(ANSWER)


@case(822, "A piece of an answer. Carries every token that is ready.")
async def a_large_piece_of_an_answer(r: RouterHand) -> None:
    """D sends twenty thousand tokens in one message: the client has them all."""
    ids = [300 + n % 1000 for n in range(LARGE)]
    sampling = sampling_pb2.SamplingParams(max_tokens=len(ids), temperature=0)
    one = await r.routed(sampling=sampling)
    one.hand_over()
    one.say(*ids[:2])
    await one.shows(ids[:2])
    one.say_last(*ids[2:])
    shown = await one.client.finished()
    expect(shown == ids, "every token, in order", f"{len(shown)} tokens")


@case(823, "At most 16, each 1 to 256 characters; empty: none.")
async def sampling_at_its_bounds(r: RouterHand) -> None:
    """Sampling with every list and number at its bound passes."""
    sampling = sampling_pb2.SamplingParams(
        max_tokens=8,
        min_tokens=8,
        temperature=100,
        top_p=1,
        seed=1,
        stop=["\u2603" * 256] * 16,
        stop_token_ids=[7] * 64,
        logprobs=20,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1e9,
        logit_bias=dict.fromkeys(range(1024), -100.0),
    )
    one = await r.routed(sampling=sampling)
    expect_equal(one.prefill.request.sampling, sampling, "sampling of Prefill")
    await one.finish(ANSWER)
