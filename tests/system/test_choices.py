"""Several choices of one request through real servers: each is the answer of a request of its own
with the seed of the choice, and all share what was computed of the prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.client import Answer, AsyncClient, Client
from pd_grpc.engine.load import load_engine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.prefill.sessions import Phase
from pd_grpc.protocol.choices import choice_seed
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.cluster import SIM, cluster
from tests.system.asking import Reply, ask, random_request, request
from tests.waiting import until

CONFIG = DecodeConfig(**SIM)
BLOCK = CONFIG.block_size
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 3))
SAMPLING = Sampling(max_tokens=12, temperature=0.8, seed=7)
BOTH_MODES = pytest.mark.parametrize("aggregated", [False, True])


def for_choices(prompt: list[int], sampling: Sampling, n: int) -> inference_pb2.GenerateRequest:
    message = request(prompt, sampling)
    message.sampling.n = n
    return message


def alone(sampling: Sampling, choice: int) -> Sampling:
    """What a request for this choice alone asks with."""
    return replace(sampling, seed=choice_seed(sampling.seed, choice))


async def ask_all(stub: Any, message: inference_pb2.GenerateRequest) -> list[Reply]:
    """Stream every choice to its end."""
    replies: defaultdict[int, Reply] = defaultdict(Reply)
    async for part in stub.Generate(message, timeout=60):
        reply = replies[part.choice]
        assert not reply.last.finish_reason, "nothing comes behind the last message of a choice"
        reply.token_ids += part.token_ids
        reply.text += part.text
        reply.last = part
    return [replies[choice] for choice in sorted(replies)]


@BOTH_MODES
async def test_each_choice_is_what_a_request_with_its_seed_alone_is_answered(
    aggregated: bool,
) -> None:
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        asked = [(*random_request(seed), 1 + seed % 5) for seed in range(12)]
        found = await asyncio.gather(*(ask_all(stub, for_choices(*each)) for each in asked))
        for (prompt, sampling, n), replies in zip(asked, found, strict=True):
            assert len(replies) == n
            for choice, reply in enumerate(replies):
                assert reply.token_ids == sim_answer(prompt, alone(sampling, choice), CONFIG)
                single = await ask(stub, request(prompt, alone(sampling, choice)))
                assert reply.essence == single.essence
            total = [
                reply.last.total_usage for reply in replies if reply.last.HasField("total_usage")
            ]
            said = sum(len(reply.token_ids) for reply in replies)
            if n > 1:
                (of_all,) = total
                counted = of_all.prompt_tokens, of_all.completion_tokens
                assert counted == (len(prompt), said)
                assert of_all.cached_tokens == replies[0].last.usage.cached_tokens
            else:
                assert not total


@BOTH_MODES
async def test_greedy_choices_are_equal(aggregated: bool) -> None:
    greedy = replace(SAMPLING, temperature=0.0)
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        replies = await ask_all(stub, for_choices(PROMPT, greedy, 3))
    assert [r.token_ids for r in replies] == [sim_answer(PROMPT, greedy, CONFIG)] * 3


@pytest.mark.parametrize("salt", [b"", b"salt"])
@BOTH_MODES
async def test_the_prompt_is_computed_once_for_all_choices(aggregated: bool, salt: bytes) -> None:
    n = 4
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        message = for_choices(PROMPT, SAMPLING, n)
        message.scope.cache_salt = salt
        replies = await ask_all(stub, message)
    computed = [len(PROMPT) - reply.last.usage.cached_tokens for reply in replies]
    rest = len(PROMPT) % BLOCK
    assert computed == [len(PROMPT)] + [rest] * (n - 1)
    assert len({reply.last.decode_instance for reply in replies}) == 1


@BOTH_MODES
async def test_without_a_prefix_cache_each_computes_it_and_nothing_else_changes(
    aggregated: bool,
) -> None:
    async with (
        cluster(aggregated=aggregated, prefix_cache=0.0) as running,
        running.client() as stub,
    ):
        replies = await ask_all(stub, for_choices(PROMPT, SAMPLING, 3))
    for choice, reply in enumerate(replies):
        assert reply.token_ids == sim_answer(PROMPT, alone(SAMPLING, choice), CONFIG)
        assert reply.last.usage.cached_tokens == 0


@BOTH_MODES
async def test_one_that_ends_early_leaves_the_others_going(aggregated: bool) -> None:
    endless = replace(SAMPLING, ignore_eos=True, max_tokens=24)
    stop = sim_answer(PROMPT, alone(endless, 1), CONFIG)[4]
    sampling = replace(endless, stop_token_ids=(stop,))
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        replies = await ask_all(stub, for_choices(PROMPT, sampling, 3))
    assert [len(reply.token_ids) for reply in replies] == [24, 5, 24]
    assert replies[1].last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert [r.token_ids for r in replies] == [
        sim_answer(PROMPT, alone(sampling, choice), CONFIG) for choice in range(3)
    ]


@BOTH_MODES
async def test_the_first_that_ends_with_its_first_token_does_not_hold_back_the_others(
    aggregated: bool,
) -> None:
    endless = replace(SAMPLING, ignore_eos=True)
    stop = sim_answer(PROMPT, endless, CONFIG)[0]
    sampling = replace(endless, stop_token_ids=(stop,))
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        replies = await ask_all(stub, for_choices(PROMPT, sampling, 3))
    assert [len(reply.token_ids) for reply in replies] == [1, 12, 12]


@BOTH_MODES
async def test_choices_continue_what_the_client_has(aggregated: bool) -> None:
    known = sim_answer(PROMPT, SAMPLING, CONFIG)[:4]
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        message = for_choices(PROMPT, replace(SAMPLING, ignore_eos=True), 2)
        message.generated_token_ids.extend(known)
        replies = await ask_all(stub, message)
    sampling = replace(SAMPLING, ignore_eos=True)
    assert [r.token_ids for r in replies] == [
        sim_answer(PROMPT, alone(sampling, choice), CONFIG, known) for choice in range(2)
    ]
    assert replies[1].last.usage.completion_tokens == SAMPLING.max_tokens


@BOTH_MODES
@pytest.mark.parametrize("choices_seen", [1, 4])
async def test_a_client_that_leaves_frees_what_all_of_them_hold(
    aggregated: bool, choices_seen: int
) -> None:
    """That every block is back is what the cluster checks at its end."""
    long = replace(SAMPLING, max_tokens=2000, ignore_eos=True)
    async with (
        cluster(aggregated=aggregated, sim_time_scale=5.0, num_blocks=1024) as running,
        running.client() as stub,
    ):
        call = stub.Generate(for_choices(PROMPT, long, 4), timeout=60)
        seen: set[int] = set()
        while len(seen) < choices_seen:
            seen.add((await call.read()).choice)
        call.cancel()
        await until(lambda: not running.router.in_flight.running())


@BOTH_MODES
async def test_choices_wait_for_room_where_there_is_little(aggregated: bool) -> None:
    """A pool that holds the prompt and the answers of some of them at once."""
    blocks = len(PROMPT) // BLOCK + 8
    sampling = replace(SAMPLING, max_tokens=3 * BLOCK, ignore_eos=True)
    async with (
        cluster(aggregated=aggregated, decode_settings={"num_blocks": blocks}) as running,
        running.client() as stub,
    ):
        replies = await ask_all(stub, for_choices(PROMPT, sampling, 8))
    assert [r.token_ids for r in replies] == [
        sim_answer(PROMPT, alone(sampling, choice), CONFIG) for choice in range(8)
    ]


def has_met_both(p: PrefillServer) -> bool:
    return [s.phase for s in p.machine.conversations.all()] == [Phase.OPEN] * 2


async def test_choices_go_to_the_pair_of_the_first_and_other_requests_elsewhere() -> None:
    """The other one comes when the choices are on their way, and is over before they are."""
    async with cluster(2, 2) as running, running.client() as stub:
        long = replace(SAMPLING, max_tokens=600, ignore_eos=True)
        short = request(PROMPT[:BLOCK], replace(long, max_tokens=2))
        # Each P meets each D: one that it has not met yet it may pass over. Ps take turns, and
        # while one D is busy the other has both.
        while not all(map(has_met_both, running.prefills)):
            busy = stub.Generate(request(PROMPT[:BLOCK], long), timeout=60)
            await busy.read()
            for _ in range(2):
                await ask(stub, short)
            busy.cancel()
            await until(lambda: not running.router.in_flight.running())
        call = stub.Generate(for_choices(PROMPT, long, 4), timeout=60)
        messages = [await call.read()]
        one = await ask(stub, short)
        while isinstance(message := await call.read(), inference_pb2.GenerateResponse):
            messages.append(message)
        ends = [message for message in messages if message.decode_instance]
        pairs = {(end.prefill_instance, end.decode_instance) for end in ends}
    assert len(ends) == 4 and len(pairs) == 1
    assert one.last.decode_instance not in {decode for _, decode in pairs}


async def test_the_python_clients_gather_them_in_order() -> None:
    async with cluster() as running:
        meant = [sim_answer(PROMPT, alone(SAMPLING, choice), CONFIG) for choice in range(3)]
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "n": 3}

        def blocking() -> list[Answer]:
            with Client(running.router.endpoint) as client:
                return client.generate(token_ids=PROMPT, **options).collect_all()

        async with AsyncClient(running.router.endpoint) as client:
            answers = await client.generate(token_ids=PROMPT, **options).collect_all()
        for found in (answers, await asyncio.to_thread(blocking)):
            assert [answer.token_ids for answer in found] == meant
            ends = [answer.end for answer in found if answer.end is not None]
            assert [end.completion_tokens for end in ends] == [len(each) for each in meant]
            (total,) = [end.total for end in ends if end.total is not None]
            assert total.prompt_tokens == len(PROMPT)
            assert total.completion_tokens == sum(map(len, meant))


# --- a real model ---------------------------------------------------------------------------------


@BOTH_MODES
async def test_choices_of_a_real_model_are_those_of_requests_alone(
    aggregated: bool, tmp_path: Path
) -> None:
    """Temperature, filters, log-probabilities and a stop string, in fp32."""
    pytest.importorskip("transformers")
    models: Any = pytest.importorskip("tests.engine.torch_models")
    folder = models.save_model(tmp_path / "tiny", models.CONFIGS["llama"]())
    prompt = [5 + 7 * n % 250 for n in range(3 * BLOCK + 5)]
    sampling = Sampling(
        max_tokens=16, temperature=0.9, top_p=0.95, top_k=60, seed=11, logprobs=1, ignore_eos=True
    )
    async with (
        cluster(
            aggregated=aggregated,
            load=load_engine,
            engine="torch",
            model=str(folder),
            dtype="float32",
            num_blocks=64,
        ) as running,
        running.client() as stub,
    ):
        replies = await ask_all(stub, for_choices(prompt, sampling, 3))
        assert len({tuple(reply.token_ids) for reply in replies}) == 3
        for choice, reply in enumerate(replies):
            single = await ask(stub, request(prompt, alone(sampling, choice)))
            assert reply.essence == single.essence
        stop = replies[1].text[2:4]
        stopping = replace(sampling, stop=(stop,))
        stopped = await ask_all(stub, for_choices(prompt, stopping, 3))
        assert stopped[1].text == replies[1].text.split(stop)[0]
        assert len(stopped[1].token_ids) < len(replies[1].token_ids)
        for choice, reply in enumerate(stopped):
            single = await ask(stub, request(prompt, alone(stopping, choice)))
            assert reply.essence == single.essence
