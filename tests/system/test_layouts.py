"""Layouts beyond the plain, through real servers: scales beside fp8, a sliding group beside a full
one. The same tokens apart and together, with and without a prefix that D holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.sim_layouts import sim_layout
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import layout_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.prefill.cluster import request_to
from tests.prefill.cluster import running as running_apart
from tests.system.asking import Reply, ask, random_request, request

BLOCK = DecodeConfig(**SIM).block_size
AT_ONCE = 16
WINDOW = 2 * BLOCK + 5
"""Shorter than most prompts, and no whole number of blocks."""

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
LAYOUTS = ("fp8-scale", "sliding", "sliding-fp8-scale")
SAMPLING = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def settings(layout: str, **more: Any) -> dict[str, Any]:
    return {"sim_layout": layout, "sim_window": WINDOW, **more}


def config_of(layout: str, **more: Any) -> DecodeConfig:
    return DecodeConfig(**{**SIM, **settings(layout, **more)})


async def answers(running: Cluster, seeds: range) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with running.client() as stub:

        async def one(seed: int) -> Reply:
            async with gate:
                return await ask(stub, request(*random_request(seed)))

        return await asyncio.gather(*(one(seed) for seed in seeds))


def transports(running: Cluster) -> list[int]:
    """What each session of each P goes by."""
    return [s.welcome.transport for p in running.prefills for s in p.machine.conversations.all()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("transport", "value"), [("inline", INLINE), ("shm", SHM)])
async def test_answers_apart_are_those_of_the_aggregated_server(
    layout: str, transport: str, value: int
) -> None:
    seeds = range(40)
    how = settings(layout, transports=(transport, "inline"))
    async with cluster(**how, decode_settings={"audit_every": 1}) as apart:
        disaggregated = await answers(apart, seeds)
        assert transports(apart) == [value]
    async with cluster(aggregated=True, **settings(layout)) as together:
        aggregated = await answers(together, seeds)
    assert [r.essence for r in disaggregated] == [r.essence for r in aggregated]
    expected = [sim_answer(*random_request(seed), config_of(layout)) for seed in seeds]
    assert [r.token_ids for r in disaggregated] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregated", [False, True])
async def test_what_d_and_p_keep_of_a_prefix_is_right_in_every_group(
    layout: str, aggregated: bool
) -> None:
    """Also of prompts that share less than the window, and more."""
    prompt = list(range(1000, 1000 + 6 * BLOCK))
    shared = [0, 1, BLOCK, 2 * BLOCK, 4 * BLOCK + 3, 6 * BLOCK - 1, 6 * BLOCK]
    asked = [prompt, *([*prompt[:kept], *range(9000, 9020)] for kept in shared), prompt]
    async with cluster(aggregated=aggregated, **settings(layout)) as running:
        found = []
        for tokens in asked:
            async with running.client() as stub:
                reply = await ask(stub, request(tokens, SAMPLING))
            assert reply.token_ids == sim_answer(tokens, SAMPLING, config_of(layout))
            found.append(reply.last.usage.cached_tokens)
    whole = [kept // BLOCK * BLOCK for kept in shared]
    assert found == [0, *whole, found[-1]] and found[-1] >= 5 * BLOCK


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_small_pools_evict_and_preempt_without_a_wrong_token(layout: str) -> None:
    seeds = range(40)
    async with cluster(**settings(layout), decode_settings={"num_blocks": 26}) as running:
        replies = await answers(running, seeds)
    expected = [sim_answer(*random_request(seed), config_of(layout)) for seed in seeds]
    assert [r.token_ids for r in replies] == expected


def planes() -> list[tuple[int, int, int]]:
    """Each group, layer and plane of the layout that has most."""
    groups = sim_layout(config_of("sliding-fp8-scale")).groups
    return [
        (g, layer, plane)
        for g, group in enumerate(groups)
        for layer in range(group.layers)
        for plane in range(len(group.planes))
    ]


class Plant:
    """Turns a bit of one plane of one layer in whatever is written to a pool from the wire."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where: tuple[int, int, int] | None = None
        self.planted = 0
        right = HostKvMemory.write

        def write(
            memory: HostKvMemory,
            blocks: list[int],
            group: int,
            layer: int,
            layers: int,
            payload: memoryview,
            heads: tuple[int, int] | None = None,
        ) -> None:
            right(memory, blocks, group, layer, layers, payload, heads)
            if self.where is None:
                return
            g, at, plane = self.where
            if g == group and layer <= at < layer + layers:
                self._turn(memory, blocks[-1], at, plane)

        monkeypatch.setattr(HostKvMemory, "write", write)

    def _turn(self, memory: HostKvMemory, block: int, layer: int, plane: int) -> None:
        assert self.where is not None
        layout = memory._layout
        group = layout.groups[self.where[0]]
        before = sum(p.token_bytes for p in group.planes[:plane]) * layout.block_size
        start = block * layout.block_bytes + layout.layer_offset(self.where[0], layer)
        memory._view[start + before] ^= 1
        self.planted += 1


@pytest.mark.timeout(120)
async def test_a_bit_turned_in_any_plane_of_any_layer_of_d_changes_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So nothing that is stored goes unlooked at, and these tests would see what is lost."""
    plant = Plant(monkeypatch)
    how = settings("sliding-fp8-scale", prefix_cache=0.0)
    async with cluster(**how) as running, running.client() as stub:
        for i, where in enumerate([None, *planes(), None]):
            plant.where, plant.planted = where, 0
            prompt = list(range(100 + i, 100 + i + 2 * BLOCK + 1))
            reply = await ask(stub, request(prompt, SAMPLING))
            right = sim_answer(prompt, SAMPLING, config_of("sliding-fp8-scale"))
            assert reply.token_ids[0] == right[0], "P's own token"
            assert plant.planted == (0 if where is None else 1)
            assert (reply.token_ids == right) == (where is None), where


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        ("plain", "fp8-scale", "layout.groups[0].planes"),
        ("fp8-scale", "plain", "layout.groups[0].planes"),
        ("plain", "sliding", "layout.groups"),
        ("sliding", "plain", "layout.groups"),
        ("sliding", "sliding-fp8-scale", "layout.groups[0].planes"),
    ],
)
async def test_a_plane_or_group_on_one_side_alone_is_refused_at_hello(
    ours: str, theirs: str, field: str
) -> None:
    """F57, F58: with the field and both values, before a block is granted, at any length."""
    async with running_apart() as running:
        p = await running.prefill(sim_layout=theirs)
        d = await running.decode(sim_layout=ours)
        for tokens in (1, 40):
            fault = (await running.run_prefill(p, request_to(d, tokens=tokens))).fault
            assert isinstance(fault, Fault)
            assert (fault.reason, fault.metadata["field"]) == (Reason.LAYOUT_MISMATCH, field)
            assert fault.metadata["ours"] != fault.metadata["theirs"]
        assert d.pool.free == d.pool.total


async def test_another_window_is_refused_at_hello() -> None:
    async with running_apart() as running:
        p = await running.prefill(sim_layout="sliding", sim_window=8)
        d = await running.decode(sim_layout="sliding", sim_window=9)
        fault = (await running.run_prefill(p, request_to(d))).fault
        assert isinstance(fault, Fault)
        assert fault.reason is Reason.LAYOUT_MISMATCH
        assert fault.metadata == {"field": "layout.groups[1].window", "ours": "9", "theirs": "8"}
