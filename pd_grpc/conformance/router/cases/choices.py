"""R22x: several choices of one request, each on two legs of its own."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from pd_grpc.conformance.calls import check_field
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.client import ClientLeg
from pd_grpc.conformance.router.answers import handed_off, last, tokens
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES as case
from pd_grpc.conformance.router.instance import DecodeLeg, PrefillLeg
from pd_grpc.conformance.router.subject import RouterHand
from pd_grpc.conformance.sampling_values import sampling_with
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import types_pb2

SEED = 7
CHOICES = 3


@dataclass(frozen=True)
class Legs:
    """The two legs of a choice that was handed over."""

    prefill: PrefillLeg
    decode: DecodeLeg

    def say(self, *ids: int) -> None:
        """D sends these tokens in one message."""
        self.decode.send(tokens(ids))

    def say_last(self, *ids: int) -> None:
        """D sends these tokens in its last message, and ends."""
        usage = types_pb2.Usage(
            prompt_tokens=len(self.prefill.request.token_ids), completion_tokens=2
        )
        self.decode.send(last(ids, usage, self.decode.instance))
        self.decode.end()


def seed_of(choice: int) -> int:
    """As the reference has it."""
    if choice == 0:
        return SEED
    digest = hashlib.sha256(struct.pack("<QI", SEED, choice)).digest()
    return int.from_bytes(digest[:8], "little")


def ask(r: RouterHand) -> ClientLeg:
    """A request for several choices, of two tokens each."""
    sampling = sampling_with(max_tokens=2, temperature=1.0, seed=SEED, n=CHOICES)
    return r.ask(sampling=sampling)


async def legs_of(r: RouterHand) -> list[Legs]:
    """The legs of every choice, in the order that they came to P. Each is handed over at once, for
    a router may wait for that."""
    decodes: dict[str, DecodeLeg] = {}
    found: list[Legs] = []
    while len(found) < CHOICES:
        prefill = await r.instances.next_prefill(f"Prefill of choice {len(found)} of {CHOICES}")
        wanted = prefill.request.ref.transfer_id
        while wanted not in decodes:
            decode = await r.instances.next_generate(f"Generate with transfer_id {wanted}")
            decodes[decode.request.handoff.ref.transfer_id] = decode
        prefill.send(handed_off(r.d, len(prefill.request.token_ids)))
        prefill.end()
        found.append(Legs(prefill, decodes[wanted]))
    return found


async def in_order(r: RouterHand) -> list[Legs]:
    """The legs of every choice in the order of their numbers, which their seeds tell."""
    by_seed = {legs.prefill.request.sampling.seed: legs for legs in await legs_of(r)}
    expect_equal({*by_seed}, {seed_of(choice) for choice in range(CHOICES)}, "the seeds")
    return [by_seed[seed_of(choice)] for choice in range(CHOICES)]


def finish(choices: list[Legs]) -> None:
    """Each says two tokens that tell its number."""
    for choice, legs in enumerate(choices):
        legs.say(901 + 10 * choice)
        legs.say_last(902 + 10 * choice)


@case(
    221,
    "each choice is a transfer of its own, on which n is unset, and P and D refuse n above 1"
    " with UNIMPLEMENTED, FEATURE.",
)
async def a_transfer_for_each(r: RouterHand) -> None:
    """Every choice has two legs with a transfer_id of its own, the prompt of the request and n
    unset."""
    client = ask(r)
    choices = await legs_of(r)
    ids = {legs.prefill.request.ref.transfer_id for legs in choices}
    expect_equal(len(ids), CHOICES, "different transfer_ids")
    prompts = {tuple(legs.prefill.request.token_ids) for legs in choices}
    expect_equal(len(prompts), 1, "prompts on the legs")
    for legs in choices:
        sampling = legs.prefill.request.sampling
        expect(sampling.n == 0, "n unset on the legs", sampling)
        expect_equal(legs.decode.request.sampling, sampling, "the sampling of Generate")
    finish(choices)
    await client.finished()


@case(
    222,
    "Choice 0 has the seed of the request; choice i above 0 has the first 8 bytes, as a"
    " little-endian number, of the SHA-256 over the seed as little-endian uint64 and i as"
    " little-endian uint32.",
)
async def a_seed_for_each(r: RouterHand) -> None:
    """The seeds of the legs are those of the choices, and what the leg with the seed of a choice
    says comes to the client as that choice."""
    client = ask(r)
    finish(await in_order(r))
    await client.finished()
    for choice in range(CHOICES):
        said = [t for m in client.messages if m.choice == choice for t in m.token_ids]
        expect_equal(said, [901 + 10 * choice, 902 + 10 * choice], f"the tokens of choice {choice}")
        ends = [m.finish_reason for m in client.messages if m.choice == choice and m.finish_reason]
        expect_equal(ends, [types_pb2.FINISH_REASON_LENGTH], f"the ends of choice {choice}")


@case(
    223,
    "Set by the router where several choices were asked for, on the last message of the last of"
    " them: what all came to. completion_tokens is the sum of theirs; the prompt is counted once,"
    " so that prompt_tokens and cached_tokens are those of choice 0.",
)
async def one_total(r: RouterHand) -> None:
    """The last message has the total, and no other has one."""
    client = ask(r)
    choices = await in_order(r)
    finish(choices)
    await client.finished()
    told = [message.HasField("total_usage") for message in client.messages]
    expect_equal(told, [False] * (len(told) - 1) + [True], "which messages have total_usage")
    total = client.last.total_usage
    prompt = len(choices[0].prefill.request.token_ids)
    counted = total.prompt_tokens, total.completion_tokens
    expect_equal(counted, (prompt, 2 * CHOICES), "total_usage of prompt and completion")


@case(
    224,
    "A choice that fails for good ends the request, and the legs of the others are cancelled:"
    " no choice is missing from an answer that ends with OK.",
)
async def one_fails_for_all(r: RouterHand) -> None:
    """One choice is complete, one fails, one goes on: the request fails, and the leg that is open
    is cancelled."""
    client = ask(r)
    first, second, third = await in_order(r)
    first.say_last(901, 902)
    third.say(921)
    while len(client.tokens) < 3:
        await client.next()
    second.decode.fail(Fault(Reason.ENGINE_ERROR, "this engine broke"))
    await r.fails(client, Reason.ENGINE_ERROR, "a choice has failed for good")
    await third.decode.cancelled("another choice has failed")


@case(225, "answers to one prompt, at most 128.")
async def too_many(r: RouterHand) -> None:
    """A request for 129 choices is refused by the name of the field."""
    sampling = sampling_with(n=129)
    fault = await r.refused(Reason.BAD_REQUEST, "n is too large", sampling=sampling)
    check_field(fault, "n")
