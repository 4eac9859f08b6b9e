"""One transfer over several streams is one transfer in spans and metrics."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from pd_grpc.engine.sim_layouts import sim_layout
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from tests.cluster import SIM, cluster
from tests.system.asking import ask, request
from tests.telemetry.recorder import Recorder, id_of, parent_of
from tests.waiting import until

LAYERS, BLOCKS = 5, 3
PROMPT = list(range(1000, 1000 + BLOCKS * DecodeConfig(**SIM).block_size - 3))
ONCE = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
CALL = "pd_grpc.v1.TransferService/Transfer"


def acked(span: ReadableSpan) -> int:
    """Layers of blocks of which a span's events say that they are in place."""
    found = [event for event in span.events if event.name == names.EVENT_ACK]
    assert span.end_time is not None
    assert all(event.timestamp <= span.end_time for event in found)
    sizes: list[Any] = [event.attributes for event in found]
    return sum(s[names.ATTR_LAYER_COUNT] * s[names.ATTR_BLOCK_COUNT] for s in sizes)


@pytest.mark.parametrize(
    ("ours", "theirs", "heads", "strands", "copies"),
    [
        ({"tp": 2}, {"tp": 4}, 4, 4, 1),
        ({"tp": 4}, {"tp": 2}, 4, 4, 1),
        # Each head lies on two shards of D, and goes to both.
        ({"tp": 1}, {"tp": 4}, 2, 4, 2),
    ],
)
async def test_the_streams_of_a_transfer_are_one_send_and_their_bytes_one_sum(
    ours: dict[str, int], theirs: dict[str, int], heads: int, strands: int, copies: int
) -> None:
    recorder = Recorder()
    shape: dict[str, Any] = {"sim_layers": LAYERS, "sim_heads": heads}
    async with cluster(
        provider=recorder.provider,
        meters=recorder.meters,
        prefill_settings=ours,
        decode_settings=theirs,
        **shape,
    ) as running:
        async with running.client() as stub:
            await ask(stub, request(PROMPT, ONCE))
        await until(lambda: "pd.request" in {span.name for span in recorder.spans})
    block_bytes = sim_layout(DecodeConfig(**SIM, **shape)).block_bytes
    send, receive = recorder.span(names.SPAN_SEND), recorder.span(names.SPAN_RECEIVE)
    for span in (send, receive):
        attributes = span.attributes or {}
        assert attributes[names.ATTR_TRANSPORT] == "inline"
        assert attributes[names.ATTR_OUTCOME] == "ok"
    assert names.ATTR_EXPOSED_S in (send.attributes or {})
    assert acked(send) == strands * LAYERS * BLOCKS, "the last stream's, too"
    calls = [s for s in recorder.spans if s.name == CALL and s.kind is SpanKind.CLIENT]
    assert [parent_of(call) for call in calls] == strands * [id_of(send)]
    for role in ("prefill", "decode"):
        moved = [
            point.value
            for labels, point in recorder.points(names.METRIC_TRANSFER_BYTES)
            if labels["role"] == role
        ]
        assert sum(moved) == copies * BLOCKS * block_bytes
        took = [
            point.count
            for labels, point in recorder.points(names.METRIC_TRANSFER_DURATION)
            if labels["role"] == role
        ]
        assert sum(took) == 1
