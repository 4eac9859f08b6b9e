"""Engines whose pools have packings of their own: canonically between unequal ones, as the bytes
lie between equal ones, and the same tokens either way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.engine.sim_layouts import TOKEN_MAJOR, sim_layout
from pd_grpc.engine.sim_reference import SimKv, sim_answer
from pd_grpc.engine.token_major import TokenMajorMemory
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.layout import CANONICAL
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from pd_grpc.v1 import layout_pb2, transfer_pb2
from tests.cluster import SIM, Cluster, cluster
from tests.decode import plain_decoder
from tests.decode.messages import BLOCK as TAPPED_BLOCK
from tests.decode.test_bytes import hand_over, tapped
from tests.system.asking import ask, random_request, request

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
BLOCK = DecodeConfig(**SIM).block_size
SHAPE: dict[str, Any] = {"sim_layout": "sliding-fp8-scale", "sim_window": 2 * BLOCK + 5}
FORMATS = {"canonical": CANONICAL, "token-major": TOKEN_MAJOR}
SAMPLING = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def between(prefill: str, decode: str, **settings: Any) -> dict[str, Any]:
    """Settings of a cluster whose P and D have these formats."""
    return {
        **SHAPE,
        **settings,
        "prefill_settings": {"sim_format": prefill},
        "decode_settings": {"sim_format": decode, "audit_every": 1},
    }


def agreed(running: Cluster) -> set[tuple[int, str]]:
    """Transport and format of each session of each P."""
    sessions = [s for p in running.prefills for s in p.machine.conversations.all()]
    return {(s.welcome.transport, s.welcome.kv_format) for s in sessions}


class Conversions:
    """Counts the slabs that an engine converts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = 0
        for name in ("read", "write"):
            monkeypatch.setattr(TokenMajorMemory, name, self._counting(name))

    def _counting(self, name: str) -> Any:
        right = getattr(TokenMajorMemory, name)

        def counting(memory: TokenMajorMemory, *slab: Any) -> Any:
            self.counted += 1
            return right(memory, *slab)

        return counting


@pytest.mark.parametrize("transport", ["inline", "shm"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("token-major", "canonical"),
        ("canonical", "token-major"),
        ("token-major", "token-major"),
    ],
)
async def test_packings_of_their_own_change_no_token(
    prefill: str, decode: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unequal ones go inline, converted; equal ones as they are, by shared memory too."""
    conversions = Conversions(monkeypatch)
    seeds = range(24)
    equal = prefill == decode
    how = between(prefill, decode, transports=tuple(dict.fromkeys((transport, "inline"))))
    async with cluster(**how) as running, running.client() as stub:
        replies = await asyncio.gather(
            *(ask(stub, request(*random_request(seed))) for seed in seeds)
        )
        expected = SHM if equal and transport == "shm" else INLINE
        assert agreed(running) == {(expected, TOKEN_MAJOR if equal else CANONICAL)}
    config = DecodeConfig(**{**SIM, **SHAPE})
    assert [r.token_ids for r in replies] == [sim_answer(*random_request(s), config) for s in seeds]
    assert (conversions.counted == 0) == equal


@pytest.mark.parametrize("decode", ["canonical", "token-major"])
async def test_a_d_keeps_prefixes_whatever_the_packings(decode: str) -> None:
    """What a P of either format sent serves the prompts that begin alike."""
    prompt = list(range(1000, 1000 + 4 * BLOCK))
    config = DecodeConfig(**{**SIM, **SHAPE})
    for first in FORMATS:
        async with cluster(**between(first, decode)) as running, running.client() as stub:
            found = []
            for more in ([], [7, 8], [9, *range(5000, 5040)]):
                reply = await ask(stub, request([*prompt, *more], SAMPLING))
                assert reply.token_ids == sim_answer([*prompt, *more], SAMPLING, config)
                found.append(reply.last.usage.cached_tokens)
            assert found == [0, len(prompt), len(prompt)]


@pytest.mark.parametrize("prefill", FORMATS)
@pytest.mark.parametrize("decode", FORMATS)
async def test_captured_bytes_are_canonical_unless_both_agree(prefill: str, decode: str) -> None:
    """What travels is seen by a decoder that knows the canonical order alone."""
    own = {"sim_layout": "sliding-fp8-scale", "sim_window": 5}
    async with tapped(**own, sim_format=decode) as (d, tap):
        prompt = list(range(100, 100 + 2 * TAPPED_BLOCK))
        asked = d.request(prompt=prompt, max_tokens=6)
        assert await hand_over(d, asked, **own, sim_format=prefill) == d.answer(asked)
        opening = transfer_pb2.TransferRequest.FromString(tap.captured[0][0]).open
        equal = prefill == decode
        assert opening.kv_format == (FORMATS[prefill] if equal else CANONICAL)
        layout = layout_to_proto(sim_layout(d.config))
        kv = SimKv(d.config)
        blocks = plain_decoder.rebuild(layout, tap.captured)
        for position, token in enumerate(prompt):
            kv.append(token)
            if (position + 1) % TAPPED_BLOCK == 0:
                same = blocks[position // TAPPED_BLOCK] == kv.last_block()
                assert same == (opening.kv_format == CANONICAL)


async def test_spans_name_the_format() -> None:
    for prefill, named in (("canonical", CANONICAL), ("token-major", TOKEN_MAJOR)):
        spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        how = between(prefill, "token-major")
        async with cluster(provider=provider, **how) as running, running.client() as stub:
            await ask(stub, request(list(range(100, 150)), SAMPLING))
        found = {
            (span.name, span.attributes[names.ATTR_KV_FORMAT])
            for span in spans.get_finished_spans()
            if span.attributes and names.ATTR_KV_FORMAT in span.attributes
        }
        assert found == {(names.SPAN_SEND, named), (names.SPAN_RECEIVE, named)}
