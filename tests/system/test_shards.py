"""P and D cut over ranks, each in its own way: the answers are those of one rank each."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from pd_grpc.decode.receiver import Receiver
from pd_grpc.engine.sim_reference import SimKv, sim_answer
from pd_grpc.protocol.config import DecodeConfig, EngineConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import layout_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.faults.silent_line import SilentLine
from tests.faults.test_f15_failed_receive import Spoiler
from tests.lines import line_to
from tests.prefill.cluster import SMALL, Request, answer_to, request_to
from tests.prefill.cluster import running as running_apart
from tests.system.asking import ask, request
from tests.waiting import until

SHAPE: dict[str, Any] = {"sim_layers": 5, "sim_heads": 4}
BLOCK = DecodeConfig(**SIM).block_size
PROMPT = list(range(1000, 1000 + 9 * BLOCK + 5))
SAMPLING = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)

WAYS = [
    ({"tp": 1}, {"tp": 1}, 4),
    ({"tp": 1}, {"tp": 2}, 4),
    ({"tp": 2}, {"tp": 1}, 4),
    ({"tp": 2}, {"tp": 4}, 4),
    ({"tp": 4}, {"tp": 2}, 4),
    # More ranks than heads: each head lies on several.
    ({"tp": 4}, {"tp": 1}, 2),
    ({"tp": 1}, {"tp": 4}, 2),
    ({"tp": 4}, {"tp": 4}, 2),
    ({"tp": 2}, {"tp": 8}, 2),
    ({"tp": 8}, {"tp": 2}, 2),
    # Runs of layers, of unequal lengths, on either side or on both.
    ({"pp": 2}, {"pp": 1}, 4),
    ({"pp": 1}, {"pp": 3}, 4),
    ({"pp": 2}, {"pp": 3}, 4),
    ({"pp": 5}, {"pp": 2}, 4),
    ({"tp": 2, "pp": 2}, {"tp": 4, "pp": 3}, 4),
    ({"tp": 4, "pp": 3}, {"tp": 2, "pp": 2}, 2),
]


async def answered(running: Cluster, prompt: list[int], sampling: Sampling) -> list[int]:
    """Ask the router."""
    async with running.client() as stub:
        reply = await ask(stub, request(prompt, sampling))
    return reply.token_ids


@pytest.mark.parametrize(("ours", "theirs", "heads"), WAYS)
async def test_f32_tokens_are_those_of_one_rank(
    ours: dict[str, int], theirs: dict[str, int], heads: int
) -> None:
    """F32, F58: whichever way either side is cut."""
    shape = {**SHAPE, "sim_heads": heads}
    async with cluster(prefill_settings=ours, decode_settings=theirs, **shape) as running:
        for prompt in (PROMPT, PROMPT[:3], [7, *PROMPT]):
            tokens = await answered(running, prompt, SAMPLING)
            assert tokens == sim_answer(prompt, SAMPLING, DecodeConfig(**SIM, **shape))
        (session,) = running.prefills[0].machine.conversations.all()
        assert session.welcome.transport == layout_pb2.TRANSPORT_INLINE


@pytest.mark.parametrize(("ours", "theirs"), [({"tp": 2}, {"tp": 4}), ({"pp": 2}, {"tp": 2})])
async def test_what_is_cached_is_cached_on_every_shard(
    ours: dict[str, int], theirs: dict[str, int]
) -> None:
    """Invariant 9: the second prompt's front is neither sent nor computed."""
    async with cluster(prefill_settings=ours, decode_settings=theirs, **SHAPE) as running:
        (d,) = running.decodes
        for prompt in (PROMPT, [*PROMPT[: 4 * BLOCK], 7, 8, 9], PROMPT):
            async with running.client() as stub:
                reply = await ask(stub, request(prompt, SAMPLING))
            expected = sim_answer(prompt, SAMPLING, DecodeConfig(**SIM, **SHAPE))
            assert reply.token_ids == expected
        assert reply.last.usage.cached_tokens == 9 * BLOCK
        assert len(d.machine.ledger.cache) > 9


def _free_pair() -> int:
    """A port that is free, as is the next."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _last_bytes_of_kv(asked: Request) -> bytes:
    """Head 1 of plane V of the last layer of the first token."""
    config = EngineConfig.model_validate({"engine": "sim", "block_size": SMALL["block_size"]})
    return SimKv(config).append(asked.tokens[0])[-config.sim_head_dim :]


async def test_one_shard_failing_on_its_last_layer_fails_the_whole() -> None:
    """A byte is wrong that shard 1 alone gets, in the last layer: no token goes on from the KV, the
    other shard's is given back as well, on both sides, and the next request is answered."""
    port = _free_pair()
    async with (
        running_apart() as apart,
        line_to(f"127.0.0.1:{port + 1}", Spoiler()) as line,
    ):
        assert isinstance(line, Spoiler)
        p = await apart.prefill(tp=2)
        told = (f"127.0.0.1:{port}", line.endpoint)
        d = await apart.decode(bulk_port=port, bulk_advertise=told, tp=2)
        spoiled, good = request_to(d, random_seed=1), request_to(d, random_seed=2)
        line.victim = _last_bytes_of_kv(spoiled)
        prefill, generate = await apart.run(p, d, spoiled)
        assert line.spoiled == 1
        assert isinstance(generate.fault, Fault) and generate.fault.reason is Reason.KV_CORRUPT
        assert isinstance(prefill.fault, Fault)
        assert generate.tokens in ([], answer_to(spoiled)[:1])
        _, generate = await apart.run(p, d, good)
        assert generate.tokens == answer_to(good)


async def test_a_shard_cut_off_in_mid_transfer_is_reached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connections to shard 1 break while KV is on its way; its streams alone are opened again,
    and the answer is right."""
    opened: list[int] = []
    right = Receiver._attach

    def attach(self: Receiver, *arguments: Any) -> Any:
        opened.append(self._shard)
        return right(self, *arguments)

    monkeypatch.setattr(Receiver, "_attach", attach)
    port = _free_pair()
    line = SilentLine()
    await line.open()
    line.lead_to(f"127.0.0.1:{port + 1}")
    async with running_apart() as apart:
        p = await apart.prefill(pp=2, sim_time_scale=1.0)
        told = (f"127.0.0.1:{port}", line.endpoint)
        d = await apart.decode(bulk_port=port, bulk_advertise=told, tp=2)
        asked = request_to(d, random_seed=3, tokens=400)
        asking = asyncio.create_task(apart.run(p, d, asked))
        await until(lambda: line.passed > 4000)
        await line.reset()
        _, generate = await asking
        assert generate.tokens == answer_to(asked)
        assert opened.count(0) == 2 and opened.count(1) == 4
    await line.close()


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_where_either_side_is_cut_kv_goes_inline_and_that_side_says_so(
    ours: int, theirs: int, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SHAPE, "transports": (transport, "inline")}
    with caplog.at_level("INFO"):
        async with cluster(
            prefill_settings={"tp": ours}, decode_settings={"tp": theirs}, **settings
        ) as running:
            tokens = await answered(running, PROMPT, SAMPLING)
            (session,) = running.prefills[0].machine.conversations.all()
            assert session.welcome.transport == layout_pb2.TRANSPORT_INLINE
    assert tokens == sim_answer(PROMPT, SAMPLING, DecodeConfig(**SIM, **SHAPE))
    cut = "prefill" if ours > 1 else "decode"
    said = [
        r for r in caplog.records if f"no KV by {transport}: an instance of 2" in r.getMessage()
    ]
    assert [record.name for record in said] == [f"pd_grpc.{cut}"]
