"""Prompts that begin alike, through real servers: what is reused, and that no token changes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.decode.receiver import Receiver
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from pd_grpc.v1 import layout_pb2, types_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.decode.wire import fault_of
from tests.prefill.cluster import answer_to, request_to
from tests.prefill.cluster import running as running_apart
from tests.system.asking import Reply, ask, request

BLOCK = DecodeConfig(**SIM).block_size
PROMPT = list(range(1000, 1000 + 5 * BLOCK))
SAMPLING = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


class Watch:
    """How much KV crosses, by what the shard writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[int] = []
        right = Receiver.open_grant

        def open_grant(receiver: Receiver, *arguments: Any) -> Any:
            self.blocks.append(sum(count for _, count in arguments[4]))
            return right(receiver, *arguments)

        monkeypatch.setattr(Receiver, "open_grant", open_grant)


async def answer(running: Cluster, prompt: list[int], salt: bytes = b"") -> Reply:
    """Ask the router; the tokens must be those of the sim model."""
    message = request(prompt, SAMPLING)
    if salt:
        message.scope.cache_salt = salt
    async with running.client() as stub:
        reply = await ask(stub, message)
    assert reply.token_ids == sim_answer(prompt, SAMPLING, DecodeConfig(**SIM))
    return reply


HITS = {
    "nothing": ([7, *PROMPT[1:]], 0),
    "part": ([*PROMPT[: 2 * BLOCK], 7, *PROMPT[2 * BLOCK + 1 :]], 2 * BLOCK),
    "all but one token": (PROMPT[:-1], 4 * BLOCK),
    "all": (PROMPT, 5 * BLOCK),
    "all and more": ([*PROMPT, 7], 5 * BLOCK),
}


@pytest.mark.parametrize("case", HITS)
@pytest.mark.parametrize("aggregated", [False, True])
async def test_whatever_is_found_the_answer_is_the_same(
    case: str, aggregated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, hit = HITS[case]
    watch = Watch(monkeypatch)
    async with cluster(aggregated=aggregated) as running:
        first = await answer(running, PROMPT)
        second = await answer(running, prompt)
    assert first.last.usage.cached_tokens == 0
    # The last token is computed, whatever is known of it.
    computed_from = min(hit, (len(prompt) - 1) // BLOCK * BLOCK)
    assert second.last.usage.cached_tokens == computed_from
    if not aggregated:
        assert watch.blocks == [5, -(-len(prompt) // BLOCK) - hit // BLOCK]


@pytest.mark.parametrize("case", HITS)
async def test_over_shared_memory_whatever_is_found_is_found_and_not_written_to(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of the sim model; so are those of who finds the first's blocks later,
    and not a byte of them has changed."""
    prompt, hit = HITS[case]
    watch = Watch(monkeypatch)
    shared: dict[str, Any] = {
        "transports": ("shm", "inline"),
        "decode_settings": {"audit_every": 1},
    }
    async with cluster(**shared) as running:
        (d,), (p,) = running.decodes, running.prefills
        await answer(running, PROMPT)
        memory = d.engine.memory
        whole = 0, 0, d.engine.layout.groups[0].layers
        found = sorted(d.machine.ledger.cache.find(BlockChain(BLOCK).names(PROMPT, 5)))
        assert len(found) == 5
        before = b"".join(memory.read(found, *whole))
        second = await answer(running, prompt)
        assert b"".join(memory.read(found, *whole)) == before
        again = await answer(running, PROMPT)
        (session,) = p.machine.conversations.all()
        assert session.welcome.transport == layout_pb2.TRANSPORT_SHM
    assert second.last.usage.cached_tokens == min(hit, (len(prompt) - 1) // BLOCK * BLOCK)
    assert again.last.usage.cached_tokens == 4 * BLOCK
    assert watch.blocks == [5, -(-len(prompt) // BLOCK) - hit // BLOCK, 0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("blocks", [24, 256])
async def test_over_shared_memory_families_answer_as_one_server_does(blocks: int) -> None:
    """Hits, evictions and waits among blocks that P writes itself; those of the aggregated mode are
    compared with the same model."""
    asked = family(5, 60)
    for aggregated in (False, True):
        async with cluster(
            aggregated=aggregated,
            transports=("inline",) if aggregated else ("shm", "inline"),
            decode_settings={"num_blocks": blocks, "audit_every": 2},
        ) as running:
            await _ask_at_once(running, asked, 8)


@pytest.mark.parametrize("without", ["prefill", "decode"])
async def test_one_side_that_keeps_nothing_is_served_by_the_other(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    off: dict[str, Any] = {f"{without}_settings": {"prefix_cache": 0.0}}
    async with cluster(**off) as running:
        await answer(running, PROMPT)
        reply = await answer(running, PROMPT)
    assert reply.last.usage.cached_tokens == (0 if without == "prefill" else 4 * BLOCK)
    assert watch.blocks == [5, 0 if without == "prefill" else 5]


async def test_a_restarted_decode_instance_is_sent_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    async with running_apart() as servers:
        p, d = await servers.prefill(), await servers.decode(name="d")
        blocks = -(-50 // p.engine.layout.block_size)
        port = int(d.endpoint.rpartition(":")[2])
        spared = []
        for _ in range(2):
            for _ in range(2):
                asked = request_to(d)
                prefill, generate = await servers.run(p, d, asked)
                assert generate.tokens == answer_to(asked), (prefill.fault, generate.fault)
                spared.append(generate.usage.cached_tokens > 0)
            await servers.stop(d)
            d = await servers.decode(name="d", port=port)
    whole = 50 // p.engine.layout.block_size
    assert watch.blocks == 2 * [blocks, blocks - whole]
    assert spared == [False, True, True, True], "P has what it computed"


async def test_another_salt_shares_nothing_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    async with cluster() as running:
        for salt in (b"a", b"b", b"", b"a"):
            reply = await answer(running, PROMPT, salt)
        assert watch.blocks == [5, 5, 5, 0]
        assert reply.last.usage.cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("aggregated", [False, True])
async def test_a_salt_that_is_too_long_is_refused(aggregated: bool) -> None:
    async with cluster(aggregated=aggregated) as running, running.client() as stub:
        message = request(PROMPT, SAMPLING)
        message.scope.cache_salt = b"s" * 65
        fault = await fault_of(stub.Generate(message, timeout=60))
        assert fault.reason is Reason.BAD_REQUEST
        assert [field.field for field in fault.fields] == ["scope.cache_salt"]


def family(seed: int, size: int) -> list[tuple[list[int], Sampling]]:
    """Requests whose prompts share beginnings of any length."""
    r = random.Random(seed)
    prompts: list[list[int]] = [[]]
    asked = []
    for _ in range(size):
        start = r.choice(prompts)
        start = start[: r.choice((len(start), r.randint(0, len(start))))]
        more = r.choice((0, 1, BLOCK - 1, BLOCK, BLOCK + 1, r.randint(0, 5 * BLOCK)))
        prompt = start + [r.randrange(3, 32000) for _ in range(more)]
        prompt = prompt[:200] or [5]
        sampling = Sampling(
            max_tokens=r.randint(1, 3 * BLOCK),
            temperature=r.choice((0.0, 0.8)),
            seed=r.randrange(100),
            ignore_eos=r.random() < 0.5,
        )
        asked.append((prompt, sampling))
        prompts += [prompt, prompt + sim_answer(prompt, sampling, DecodeConfig(**SIM))]
    return asked


async def _ask_at_once(running: Cluster, asked: list[tuple[list[int], Sampling]], n: int) -> None:
    gate = asyncio.Semaphore(n)
    async with running.client() as stub:

        async def one(prompt: list[int], sampling: Sampling) -> Reply:
            async with gate:
                return await ask(stub, request(prompt, sampling))

        replies = await asyncio.gather(*(one(*each) for each in asked))
    for (prompt, sampling), reply in zip(asked, replies, strict=True):
        assert reply.token_ids == sim_answer(prompt, sampling, DecodeConfig(**SIM))
        assert reply.last.usage.cached_tokens < len(prompt)


@given(
    seed=st.integers(0, 2**32),
    at_once=st.sampled_from((1, 4, 16)),
    blocks=st.sampled_from((20, 32, 256)),
    share=st.sampled_from((0.2, 1.0)),
    aggregated=st.booleans(),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_families_of_prompts_are_answered_as_the_model_says(
    seed: int, at_once: int, blocks: int, share: float, aggregated: bool
) -> None:
    """Also where the pools are small: blocks are evicted, requests wait and are preempted."""

    async def run() -> None:
        async with cluster(
            aggregated=aggregated,
            prefix_cache=share,
            prefill_settings={"num_blocks": blocks},
            decode_settings={"num_blocks": blocks},
        ) as running:
            await _ask_at_once(running, family(seed, 24), at_once)

    asyncio.run(run())


async def test_of_requests_at_once_most_of_a_shared_beginning_is_found() -> None:
    r = random.Random(1)
    shared = [r.randrange(3, 32000) for _ in range(8 * BLOCK)]
    asked = [([*shared, *(r.randrange(3, 32000) for _ in range(9))], SAMPLING) for _ in range(40)]
    async with cluster() as running:
        await _ask_at_once(running, asked[:1], 1)
        await _ask_at_once(running, asked[1:], 16)
        counts = running.decodes[0].pool.counts()
        assert sum(counts.values()) == running.decodes[0].pool.total


async def test_the_count_of_tokens_that_were_spared_reaches_the_client() -> None:
    async with cluster() as running:
        await answer(running, PROMPT)
        reply = await answer(running, [*PROMPT, 7, 8])
        usage = reply.last.usage
    assert usage == types_pb2.Usage(
        prompt_tokens=len(PROMPT) + 2, completion_tokens=6, cached_tokens=len(PROMPT)
    )


async def test_the_span_of_an_allocate_says_what_d_had() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with cluster(provider=provider) as running:
        for _ in range(2):
            await answer(running, PROMPT)
    asked = [s for s in spans.get_finished_spans() if s.name == names.SPAN_ALLOCATE]
    found = [(s.attributes or {}).get(names.ATTR_CACHED_TOKENS) for s in asked]
    assert found == [None, 5 * BLOCK]
