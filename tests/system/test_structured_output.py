"""Answers that follow a grammar, through P and D and of D alone, beside others that follow none."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from pd_grpc.blocks.pool import BlockPool, Holding
from pd_grpc.decode import server as decode_server
from pd_grpc.engine import grammar as grammar_module
from pd_grpc.engine import grammar_trial
from pd_grpc.engine.base import Engine
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.prefill import server as prefill_server
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig, EngineConfig, PrefillConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.sampling import GrammarKind, Sampling, StructuredOutput
from pd_grpc.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from tests.cluster import Cluster, cluster
from tests.engine.grammar_trials import HOSTILE, trials_under_way
from tests.engine.torch_models import CONFIGS, another_pool, load_tiny, save_model
from tests.faults.test_f29_torch_preemption import preemptions
from tests.system.asking import Reply, ask, request
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.timeout(300)

Load = Callable[[EngineConfig], Engine]
PROMPT = list(range(40, 70))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 8},
        "age": {"type": "integer", "minimum": 10, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["grün", "藍", "🎉"]}, "minItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FOLLOWS_SCHEMA = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORDS = "((é|日本|🎉) ){20,30}"
FOLLOWS_WORDS = StructuredOutput(GrammarKind.REGEX, WORDS)
TINY: dict[str, Any] = {
    "engine": "torch",
    "dtype": "float32",
    "block_size": 8,
    "num_blocks": 256,
    "chunk_tokens": 32,
    "threads": 1,
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Engines of a tiny random model, whose tokens are bytes, each with a pool of its own."""
    folder = save_model(tmp_path_factory.mktemp("tiny"), CONFIGS["llama"]())
    return another_pool(load_tiny(folder, threads=1))


def sampling(grammar: StructuredOutput | None, seed: int, **options: Any) -> Sampling:
    """Greedy where the seed is 0."""
    told = {"max_tokens": 160, "temperature": 1.0 if seed else 0.0, "seed": seed}
    return Sampling(**{**told, "structured_output": grammar, **options})


ASKED = [
    sampling(FOLLOWS_SCHEMA, 0),
    *(sampling(FOLLOWS_SCHEMA, seed) for seed in range(1, 5)),
    sampling(FOLLOWS_WORDS, 0),
    sampling(FOLLOWS_WORDS, 7, min_tokens=100, ignore_eos=True),
    sampling(FOLLOWS_WORDS, 8, max_tokens=1),
    sampling(StructuredOutput(GrammarKind.REGEX, "(yes|no)"), 9),
    sampling(StructuredOutput(GrammarKind.REGEX, "x"), 10),
    sampling(None, 11, max_tokens=40, ignore_eos=True),
    sampling(None, 0, max_tokens=40, ignore_eos=True),
]


async def answers(running: Cluster, asked: list[inference_pb2.GenerateRequest]) -> list[Reply]:
    async with running.client() as stub:
        return await asyncio.gather(*(ask(stub, each) for each in asked))


def assert_follows(text: str, reply: Reply, asked: Sampling) -> None:
    """The whole answer does, or it was cut by max_tokens."""
    if reply.last.finish_reason == types_pb2.FINISH_REASON_LENGTH:
        assert len(reply.token_ids) == asked.max_tokens
        return
    wanted = asked.structured_output
    assert wanted is not None
    if wanted.kind is GrammarKind.REGEX:
        assert re.fullmatch(wanted.text, text)
        return
    value = json.loads(text)
    assert [*value] == ["name", "age", "tags"]
    assert 4 <= len(value["name"]) <= 8 and 10 <= value["age"] <= 150
    assert value["tags"] and {*value["tags"]} <= {"grün", "藍", "🎉"}


async def test_they_are_alike_apart_and_together_and_when_continued(load: Load) -> None:
    asked = [request(PROMPT, each) for each in ASKED]
    async with cluster(load=load, aggregated=True, **TINY) as together:
        one = await answers(together, asked)
    async with cluster(load=load, **TINY) as apart:
        two = await answers(apart, asked)
        rests, begun = [], []
        for each, whole in zip(ASKED, two, strict=True):
            for given in {1, len(whole.token_ids) // 2, len(whole.token_ids) - 1} - {0}:
                if given < len(whole.token_ids):
                    rest = request(PROMPT, each)
                    rest.generated_token_ids.extend(whole.token_ids[:given])
                    rests.append(rest)
                    begun.append((whole, given))
        continued = await answers(apart, rests)
    assert [reply.essence for reply in two] == [reply.essence for reply in one]
    for reply, (whole, given) in zip(continued, begun, strict=True):
        assert reply.token_ids == whole.token_ids[given:]
        assert reply.last.finish_reason == whole.last.finish_reason
    for each, reply in zip(ASKED, two, strict=True):
        if each.structured_output is not None:
            assert_follows(reply.text, reply, each)
    # Most were not cut, and nothing stands after what could go no further.
    ends = [reply.last.finish_reason for reply in two]
    assert ends.count(types_pb2.FINISH_REASON_STOP) >= 5
    assert two[8].text in ("yes", "no") and two[9].text == "x" and len(two[9].token_ids) == 1


async def test_f29_a_preempted_one_goes_on_where_it_stood(load: Load) -> None:
    asked = [request(PROMPT, sampling(FOLLOWS_WORDS, seed)) for seed in range(4)]
    async with cluster(load=load, **TINY) as roomy:
        meant = await answers(roomy, asked)
    async with cluster(load=load, decode_settings={"num_blocks": 48}, **TINY) as apart:
        seen = preemptions(apart.decodes[0])
        replies = await answers(apart, asked)
    assert [reply.essence for reply in replies] == [reply.essence for reply in meant]
    assert seen, "the pool was large enough for all, which shows nothing"
    for reply, seed in zip(replies, range(4), strict=True):
        assert_follows(reply.text, reply, sampling(FOLLOWS_WORDS, seed))


async def refusal(running: Cluster, asked: inference_pb2.GenerateRequest) -> Fault:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answers(running, [asked])
    fault = rpc.read_error(raised.value)
    assert isinstance(fault, Fault)
    return fault


def blocks_taken(running: Cluster, patch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks are taken from any pool from now on, each time."""
    taken: list[int] = []

    def noting(pool: BlockPool) -> None:
        right = pool._grow

        def grow(holding: Holding, count: int) -> None:
            taken.append(count)
            right(holding, count)

        patch.setattr(pool, "_grow", grow)

    for pool in running.pools():
        noting(pool)
    return taken


@pytest.mark.parametrize("aggregated", [False, True])
async def test_what_cannot_be_followed_is_refused_before_it_costs_a_block(
    load: Load, aggregated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(load=load, aggregated=aggregated, **TINY) as running:
        taken = blocks_taken(running, monkeypatch)
        for wanted, kind, reason in [
            (StructuredOutput(GrammarKind.REGEX, "(a"), "regex", "unclosed group"),
            (StructuredOutput(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "json_schema", "not"),
            (StructuredOutput(GrammarKind.REGEX, "a" * 16385), "regex", "16384 bytes"),
            (StructuredOutput(GrammarKind.REGEX, "a{1000000}"), "regex", "at most 50000"),
        ]:
            fault = await refusal(running, request(PROMPT, sampling(wanted, 0)))
            assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.BAD_REQUEST)
            assert [each.field for each in fault.fields] == ["sampling.structured_output"]
            assert fault.fields[0].description.startswith(f"{kind}: ")
            assert reason in fault.fields[0].description
        strayed = request(PROMPT, sampling(FOLLOWS_WORDS, 0))
        strayed.generated_token_ids.extend(running.decodes[0].engine.tokenizer().encode("é x"))
        fault = await refusal(running, strayed)
        assert [each.field for each in fault.fields] == ["generated_token_ids[3]"]
        assert taken == []
        await answers(running, [request(PROMPT, sampling(FOLLOWS_WORDS, 0, max_tokens=2))])
        assert taken


@pytest.mark.parametrize("lacks", ["p0", "d0"])
async def test_whoever_cannot_is_not_asked_to(load: Load, lacks: str) -> None:
    def one_without(config: EngineConfig) -> Engine:
        engine = load(config)
        assert isinstance(engine, TorchEngine)
        if config.model_dump().get("name") == lacks:
            engine.features -= {"structured_output"}
            engine.grammars = None
        return engine

    async with cluster(load=one_without, **TINY) as running:
        fault = await refusal(running, request(PROMPT, sampling(FOLLOWS_WORDS, 0)))
        assert (fault.code, fault.reason) == (Code.UNIMPLEMENTED, Reason.FEATURE)
        assert fault.metadata["feature"] == "sampling.structured_output"
        await answers(running, [request(PROMPT, sampling(None, 0, max_tokens=3))])


async def test_one_that_grows_too_complex_fails_alone(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_LEXER_STATES", 600)
    monkeypatch.setattr(grammar_module, "_QUICK_S", -1.0)
    # The check would find it, so small is the bound.
    monkeypatch.setattr(grammar_module, "_WALKS", 0)
    wide = StructuredOutput(GrammarKind.REGEX, r"(\w{1,60}\s){1,60}")
    beside = request(PROMPT, sampling(None, 3, max_tokens=150, ignore_eos=True))
    async with cluster(load=load, **TINY) as running:
        (alone,) = await answers(running, [beside])
        complex_one = request(PROMPT, replace(sampling(wide, 5), min_tokens=160))
        fault, (crowded,) = await asyncio.gather(
            refusal(running, complex_one), answers(running, [beside])
        )
    assert (fault.code, fault.reason) == (Code.INTERNAL, Reason.ENGINE_ERROR)
    assert "too many states" in fault.message
    assert crowded.essence == alone.essence


def prefilled(channel: grpc.aio.Channel) -> Any:
    """A call of P's whose grammar is hostile."""
    message = prefill_pb2.PrefillRequest(
        ref=types_pb2.TransferRef(transfer_id="t", attempt=1),
        request_id="r",
        token_ids=PROMPT,
        sampling=HOSTILE,
        decodes=[prefill_pb2.DecodeTarget(name="d", endpoint="127.0.0.1:1")],
    )
    return prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(message, timeout=60)


def generated(channel: grpc.aio.Channel) -> Any:
    """The same of D's."""
    prompt = inference_pb2.TokenIds(ids=PROMPT)
    message = inference_pb2.GenerateRequest(token_ids=prompt, sampling=HOSTILE)
    return inference_pb2_grpc.InferenceServiceStub(channel).Generate(message, timeout=60)


@pytest.mark.parametrize("on_prefill", [True, False], ids=["P", "D"])
async def test_who_waits_for_a_trial_hears_that_its_server_leaves(
    load: Load, on_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is, its word gets out.
    monkeypatch.setattr(decode_server, "STOP_GRACE_S", LIMIT_S)
    monkeypatch.setattr(prefill_server, "LAST_WORDS_S", LIMIT_S)
    server: Any
    if on_prefill:
        config: Any = PrefillConfig(**TINY)
        server = await prefill_server.start_prefill(config, load(config))
    else:
        config = DecodeConfig(**TINY)
        server = await decode_server.start_decode(config, load(config))
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        call = prefilled(channel) if on_prefill else generated(channel)
        reading = asyncio.create_task(call.read())
        await until(lambda: bool(trials_under_way()))
        (trial,) = trials_under_way()
        # Of itself it ends no more.
        trial.send_signal(signal.SIGSTOP)
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reading
    fault = rpc.read_error(refused.value)
    assert isinstance(fault, Fault) and fault.reason is Reason.DRAINING, fault
    server.pool.check()
    assert server.pool.free == server.pool.total


@pytest.mark.model
def test_the_packaged_model_writes_json(smollm2: TorchEngine) -> None:
    """Its tokens are parts of words and of characters."""
    grammars = smollm2.grammars
    assert grammars is not None
    tokenizer = smollm2.tokenizer()
    said = '{"name":"Zoë 日本 🎉","age":42,"tags":["grün","🎉"]}'
    wanted = grammars.compile(FOLLOWS_SCHEMA, grammar_trial.Trials())
    assert grammars.check_output(wanted, tokenizer.encode(said)) == len(tokenizer.encode(said))
    strayed = tokenizer.encode(said.replace("42", "4.2"))
    assert grammars.check_output(wanted, strayed) < len(strayed)
