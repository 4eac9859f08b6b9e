"""Baggage of a caller goes along with its request, within bounds, and into nothing that is kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from opentelemetry import baggage as api
from opentelemetry import context as current
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pd_grpc.client import AsyncClient
from pd_grpc.protocol.interception import Interceptors
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry.baggage import MOST_BYTES, MOST_MEMBERS
from pd_grpc.telemetry.tracing import extract, inject
from tests.cluster import Cluster, cluster
from tests.system.asking import request
from tests.waiting import until

SOUND = [
    "tenant=marzipan",
    "a=1,b=2,c=",
    "user%20id=x;secret;ttl=5 , b = 2",
    "k=" + "x" * (MOST_BYTES - 2),
    ",".join(f"k{i}=v" for i in range(MOST_MEMBERS)),
]
UNSOUND = [
    "",
    "no value",
    "=marzipan",
    "a=1,,b=2",
    "a=1,",
    'a="quoted"',
    "a=b c",
    "a=1;=2",
    "a b=1",
    "a=b" + ";p= " * 1000 + '"',
    "a=" + " " * 4000 + '"',
    "k=" + "x" * (MOST_BYTES - 1),
    ",".join(f"k{i}=v" for i in range(MOST_MEMBERS + 1)),
]


def passed_on(metadata: Iterable[tuple[str, str]]) -> list[str]:
    """The baggage of a call made for one that came with this metadata."""
    return [value for key, value in inject(extract(metadata)) if key == "baggage"]


@pytest.mark.parametrize("sound", SOUND, ids=lambda s: s[:20])
def test_what_is_sound_is_passed_on_as_it_came(sound: str) -> None:
    assert passed_on([("baggage", sound)]) == [sound]


@pytest.mark.parametrize("unsound", UNSOUND, ids=lambda s: s[:20] or "empty")
def test_what_is_malformed_or_too_long_is_dropped_without_a_word(
    unsound: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert passed_on([("baggage", unsound)]) == []
    assert caplog.records == []


def test_several_values_are_one_and_bounded_together() -> None:
    assert passed_on([("baggage", "a=1"), ("baggage", "b=2")]) == ["a=1,b=2"]
    half = "k=" + "x" * (MOST_BYTES // 2)
    assert passed_on([("baggage", half), ("baggage", half)]) == []


def test_it_takes_the_place_of_what_the_metadata_had() -> None:
    context = extract([("baggage", "a=1")])
    assert inject(context, [("baggage", "b=2"), ("other", "x")]) == [
        ("other", "x"),
        ("baggage", "a=1"),
    ]
    assert inject(Context(), [("baggage", "b=2")]) == []


def test_what_a_program_has_set_by_the_interface_of_opentelemetry_is_bounded_too() -> None:
    context = api.set_baggage("who", "Zoë, 7", Context())
    assert inject(context) == [("baggage", "who=Zo%C3%AB%2C%207")]
    assert inject(api.set_baggage("who", "x" * MOST_BYTES, Context())) == []


class Watching(grpc.aio.ServerInterceptor):  # type: ignore[type-arg,unused-ignore]
    """Notes the baggage of each call that an instance serves."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        metadata = details.invocation_metadata
        self.seen += [(method, str(value)) for key, value in metadata if key == "baggage"]
        return await continuation(details)


@dataclass
class Watched:
    """A running cluster, and what each of its instances is told."""

    running: Cluster
    router: Watching
    prefill: Watching
    decode: Watching
    spans: InMemorySpanExporter


@asynccontextmanager
async def watched(recorded: bool = True) -> AsyncIterator[Watched]:
    router, prefill, decode = Watching(), Watching(), Watching()
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with cluster(
        provider=provider if recorded else None,
        router_wire=Interceptors(server=(router,)),
        prefill_wire=Interceptors(server=(prefill,)),
        decode_wire=Interceptors(server=(decode,)),
    ) as running:
        yield Watched(running, router, prefill, decode, exporter)


MESSAGE = request(list(range(3, 90)), Sampling(max_tokens=3, temperature=0.0, ignore_eos=True))
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-"


async def asked_with(each: Watched, *metadata: tuple[str, str]) -> None:
    """Have a request answered that carries this metadata."""
    async with each.running.client() as stub:
        tokens = 0
        async for part in stub.Generate(MESSAGE, timeout=30, metadata=metadata):
            tokens += len(part.token_ids)
        assert tokens == 3


@pytest.mark.parametrize(
    ("recorded", "flags"),
    [(True, "01"), (True, "00"), (False, "01")],
    ids=["on", "left out", "off"],
)
async def test_it_reaches_prefill_and_decode_with_every_call_of_the_request(
    recorded: bool, flags: str
) -> None:
    line = "tenant=marzipan,plan=b;since=2026"
    async with watched(recorded) as each:
        await asked_with(each, ("traceparent", TRACEPARENT + flags), ("baggage", line))
        assert each.router.seen == [("Generate", line)]
        assert each.prefill.seen == [("Prefill", line)]
        assert {*each.decode.seen} == {
            ("Generate", line),
            ("Allocate", line),
            ("Transfer", line),
            ("SendFirstToken", line),
        }


@pytest.mark.parametrize("unsound", ["k=" + "x" * MOST_BYTES, "marzipan"], ids=["long", "odd"])
async def test_what_is_too_long_or_malformed_costs_its_request_nothing(unsound: str) -> None:
    async with watched() as each:
        await asked_with(each, ("baggage", unsound))
        assert each.router.seen == [("Generate", unsound)]
        assert each.prefill.seen == each.decode.seen == []
        # The next caller is told nothing of the last.
        await asked_with(each, ("baggage", "a=1"))
        await asked_with(each)
        assert each.prefill.seen == [("Prefill", "a=1")]


async def test_as_much_as_its_standard_allows_is_no_reason_to_refuse_a_call() -> None:
    unsound = "k=" + "x" * (8192 - 2)
    async with watched() as each:
        # gRPC would refuse one in twenty or so, by chance.
        for _ in range(100):
            await asked_with(each, ("baggage", unsound))
        assert each.prefill.seen == each.decode.seen == []


async def test_no_span_has_it() -> None:
    async with watched() as each:
        await asked_with(each, ("baggage", "tenant=marzipan"))
        await until(lambda: "pd.decode" in {s.name for s in each.spans.get_finished_spans()})
    assert not [s.name for s in each.spans.get_finished_spans() if "marzipan" in s.to_json()]


async def test_a_client_sends_what_its_program_has_set() -> None:
    async with watched() as each, AsyncClient(each.running.router.endpoint) as client:
        token = current.attach(api.set_baggage("tenant", "marzipan"))
        try:
            await client.generate("a word", max_tokens=2).collect()
        finally:
            current.detach(token)
        await client.generate("a word", max_tokens=2).collect()
        assert each.router.seen == [("Generate", "tenant=marzipan")]
