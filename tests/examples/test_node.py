"""A decode side in another language takes over what our prefill computes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import grpc.aio
import pytest

from pd_grpc.conformance.decode import DECODE_CASES, open_decode
from pd_grpc.conformance.report import explained
from pd_grpc.conformance.run import run_cases
from pd_grpc.conformance.transcript import Transcript
from pd_grpc.engine.sim import SimEngine
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill.server import PrefillServer, start_prefill
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, PrefillConfig, RouterConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.server import RouterServer, start_router
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.conformance.subjects import TRIES
from tests.examples.node_process import (
    KIT,
    NodeDecode,
    install_packages,
    node_client,
    node_decode,
)
from tests.system.asking import Reply, ask, random_request, request
from tests.waiting import LIMIT_S, until

BLOCK = 16
TOKENIZER = SimTokenizer(32000)
GREEDY = Sampling(max_tokens=8, temperature=0.0)
SEVERAL_SHARDS = ["D343", "D344", "D345", "D346"]
"""Cases for a D that takes KV from several shards of P, which decode.js refuses at Hello."""


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    install_packages()


@dataclass
class Site:
    """A router, a prefill instance of ours and decode.js."""

    d: NodeDecode
    router: RouterServer
    stub: inference_pb2_grpc.InferenceServiceStub
    p: PrefillServer | None

    async def ask(self, prompt: list[int], sampling: Sampling) -> Reply:
        return await ask(self.stub, request(prompt, sampling))

    async def fault(self, prompt: list[int], sampling: Sampling) -> Fault:
        """What the client hears of a request that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.ask(prompt, sampling)
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault), fault
        return fault

    async def in_flight(self) -> int:
        """Transfers that D has not ended."""
        info = await self._server_info()
        return sum(count.transfers for count in info.transfers)

    async def settled(self) -> None:
        """Every block of D and P is free again."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            blocks = {count.state: count.blocks for count in (await self._server_info()).blocks}
            if set(blocks) <= {admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED}:
                break
            assert time.monotonic() < deadline, blocks
        if self.p is not None:
            pool = self.p.pool
            await until(lambda: pool.free == pool.total)

    async def _server_info(self) -> admin_pb2.ServerInfo:
        async with grpc.aio.insecure_channel(self.d.endpoint) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=60)
        info: admin_pb2.ServerInfo = answer.server
        return info


@contextlib.asynccontextmanager
async def site(*, aggregated: bool = False, **options: int | str) -> AsyncIterator[Site]:
    """All three, ready for requests."""
    async with contextlib.AsyncExitStack() as stack:
        d = await stack.enter_async_context(node_decode(name="d-node", **options))
        p = None
        if not aggregated:
            config = PrefillConfig(name="p", engine="sim", num_blocks=256, chunk_tokens=64)
            p = await start_prefill(config, SimEngine(config))
            stack.push_async_callback(p.stop)
        settings = RouterConfig(
            name="router",
            engine="sim",
            prefill=() if p is None else (p.endpoint,),
            decode=(d.endpoint,),
            aggregated=aggregated,
        )
        router = await start_router(settings, TOKENIZER)
        stack.push_async_callback(router.stop, 0.0)
        await until(lambda: router.ready)
        channel = rpc.aio_channel(router.endpoint, RouterConfig(), RouterConfig())
        await stack.enter_async_context(channel)
        yield Site(d, router, inference_pb2_grpc.InferenceServiceStub(channel), p)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    r = random.Random(1000 * seed + tokens)
    return [r.randrange(3, 32000) for _ in range(tokens)]


def answer(ids: list[int], sampling: Sampling) -> list[int]:
    return sim_answer(ids, sampling, EngineConfig(engine="sim"))


def stopping(ids: list[int], stops: Callable[[list[int]], Sampling]) -> tuple[list[int], Sampling]:
    """A request that `stops` makes of what would be answered greedily."""
    return ids, stops(answer(ids, replace(GREEDY, max_tokens=12, ignore_eos=True)))


def asked() -> list[tuple[list[int], Sampling]]:
    """Requests of every kind."""
    seeded = Sampling(max_tokens=24, temperature=0.8, top_p=0.9, top_k=50, seed=2**63 + 5)
    long = replace(GREEDY, max_tokens=12, ignore_eos=True)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 64, 160, 161, 700)
    made = [(prompt(n, seed), s) for n in lengths for seed, s in enumerate((GREEDY, seeded))]
    made += [(prompt(n), replace(s, max_tokens=1)) for n in (1, 16, 40) for s in (GREEDY, seeded)]
    made.append(stopping(prompt(20), lambda said: replace(long, stop_token_ids=(said[3],))))
    made.append(stopping(prompt(21), lambda said: replace(long, stop_token_ids=(said[0],))))
    made.append(
        stopping(
            prompt(22), lambda said: replace(long, stop_token_ids=(said[0], said[2]), min_tokens=5)
        )
    )
    made.append(
        stopping(prompt(23), lambda said: replace(long, stop=(TOKENIZER.decode(said[2:4])[1:],)))
    )
    made += [random_request(seed) for seed in range(60)]
    return made


async def test_every_answer_goes_on_from_the_kv_that_our_prefill_computed() -> None:
    async with site() as running:
        replies = await asyncio.gather(*(running.ask(*one) for one in asked()))
        for one, reply in zip(asked(), replies, strict=True):
            assert reply.token_ids == answer(*one), one
            assert reply.last.usage.prompt_tokens == len(one[0])
            assert reply.last.usage.completion_tokens == len(reply.token_ids)
            assert (reply.last.prefill_instance, reply.last.decode_instance) == ("p", "d-node")
        await running.settled()


async def test_it_prefills_what_comes_without_a_hand_over() -> None:
    async with site(aggregated=True) as running:
        replies = await asyncio.gather(*(running.ask(*one) for one in asked()))
        assert [reply.token_ids for reply in replies] == [answer(*one) for one in asked()]
        await running.settled()


async def test_with_few_blocks_later_requests_wait_for_their_turn() -> None:
    async with site(num_blocks=24) as running:
        requests = [random_request(seed) for seed in range(40)]
        replies = await asyncio.gather(*(running.ask(*one) for one in requests))
        assert [reply.token_ids for reply in replies] == [answer(*one) for one in requests]
        await running.settled()


async def test_another_shape_of_kv_is_spoken_of_by_name() -> None:
    async with site(head_dim=16) as running:
        fault = await running.fault(prompt(20), GREEDY)
        assert fault.reason is Reason.LAYOUT_MISMATCH
        assert fault.metadata["field"] == "layout.groups[0].planes[0].head_dim"


@pytest.mark.longest
@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", [0, 1])
async def test_it_passes_every_case_of_the_kit(half: int) -> None:
    # By halves, each before a decode.js of its own, for the whole takes longest of all tests.
    async with (
        node_decode(**KIT) as d,
        open_decode(d.endpoint) as subject,
    ):
        results = await run_cases(subject, [*DECODE_CASES][half::2], tries=TRIES)
    assert not [explained(result) for result in results if result.passed is False]
    others = [result.id for result in results if result.passed is None]
    assert others == [id for id in SEVERAL_SHARDS if id in {result.id for result in results}]


async def test_a_corrupted_chunk_ends_the_transfer_and_reaches_the_client() -> None:
    async with (
        node_decode(**KIT) as d,
        open_decode(d.endpoint) as subject,
        subject.case("node", Transcript()) as hand,
    ):
        p, asks = await hand.prefill(), hand.request()
        leg = hand.generate(asks)
        grant = await p.allocate(asks)
        transfer = await p.open(asks, grant)
        await transfer.opened()
        chunk = p.kv(asks, grant)[0]
        chunk.payload = bytes([chunk.payload[0] ^ 1]) + chunk.payload[1:]
        await transfer.send(chunk)
        await transfer.refused(Reason.KV_CORRUPT, "a checksum that is wrong")
        await leg.fails(Reason.KV_CORRUPT, "its KV was corrupted")
        ended = await p.told_of(asks, "the end of the transfer")
        assert ended.status.code == grpc.StatusCode.DATA_LOSS.value[0]


async def test_when_it_is_killed_the_client_hears_so_at_once() -> None:
    async with site() as running:
        endless = replace(GREEDY, max_tokens=3000, ignore_eos=True)
        call = running.stub.Generate(request(prompt(40), endless), timeout=30)
        await call.read()
        running.d.process.kill()
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read():
                pass
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.DECODE_LOST
        assert time.monotonic() - began < 15, "long before its deadline"
        assert running.p is not None
        pool = running.p.pool
        await until(lambda: pool.free == pool.total)


async def test_a_client_that_leaves_gives_the_blocks_back() -> None:
    async with site() as running:
        endless = replace(GREEDY, max_tokens=3000, ignore_eos=True)
        call = running.stub.Generate(request(prompt(40), endless), timeout=30)
        await call.read()
        call.cancel()
        await running.settled()
        assert await running.in_flight() == 0


async def test_a_signal_ends_it_with_a_goodbye() -> None:
    async with node_decode(**KIT) as d, open_decode(d.endpoint) as subject:
        hand = subject.case("node", Transcript())
        async with contextlib.AsyncExitStack() as stack:
            made = await hand.__aenter__()
            stack.push_async_callback(made.leave)
            p, asks = await made.prefill(), made.request()
            leg = made.generate(asks)
            grant = await p.allocate(asks)
            await p.first_token(asks, grant, 300)
            await leg.next()
            d.process.send_signal(signal.SIGTERM)
            await p.hears("goodbye", "goodbye")
            await leg.fails(Reason.DRAINING, "D leaves")
            assert await d.ends() == 0


async def test_a_drain_finishes_what_runs_and_then_exits() -> None:
    async with site() as running:
        long = replace(GREEDY, max_tokens=600, ignore_eos=True)
        call = running.stub.Generate(request(prompt(40), long), timeout=30)
        tokens = [*(await call.read()).token_ids]
        async with grpc.aio.insecure_channel(running.d.endpoint) as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        while message := await call.read():
            tokens += message.token_ids
        assert tokens == answer(prompt(40), long)
        assert await running.d.ends() == 0


async def test_the_client_streams_text_from_the_router() -> None:
    async with site() as running:
        text = "Once upon a time there was a prefill"
        said = answer(TOKENIZER.encode(text), Sampling(max_tokens=32, temperature=0.0))
        status, out, errors = await node_client(running.router.endpoint, text)
        assert (status, out, errors) == (0, TOKENIZER.decode(said) + "\n", "")


async def test_the_client_says_why_there_is_no_answer() -> None:
    async with site() as running:
        running.d.process.kill()
        await until(lambda: not running.router.ready)
        status, out, errors = await node_client(running.router.endpoint, "hello")
        assert (status, out) == (1, "")
        assert errors.startswith("UNAVAILABLE NO_INSTANCE: ")
