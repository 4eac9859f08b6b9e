"""The trace of an answer that did not come the straight way, and what it waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from pd_grpc.client import Answer, AsyncClient, AsyncGeneration
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.span_messages import read_spans
from pd_grpc.telemetry.partition import Partition, partition, requests
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.cluster import Cluster, cluster
from tests.waiting import until

KEPT: dict[str, Any] = {"traces_kept": 64, "router_settings": {"traces_kept": 64}}
SLOW: dict[str, Any] = {"sim_time_scale": 20.0, "chunk_tokens": 64}
COMPUTING = types_pb2.TRANSFER_STATE_COMPUTING
STAGES = ["pd.queue", "pd.prepare", "pd.queue", "pd.compute", "pd.first_token"]
DECODING = ["pd.step_wait", "pd.decode"]


def ask(client: AsyncClient) -> AsyncGeneration:
    return client.generate(
        token_ids=list(range(3, 400)), max_tokens=12, temperature=0, ignore_eos=True
    )


async def told(running: Cluster, trace_id: str) -> Partition:
    """Where the time of the one request of a trace went."""
    await until(lambda: not running.router.in_flight.running())
    async with grpc.aio.insecure_channel(running.router.endpoint) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.GetTraceRequest(id=trace_id, peers=True)
        answer = await admin.GetTrace(request, timeout=60)
    (found,) = requests(read_spans(answer.spans))
    return partition(found)


def path(found: Partition, attempt: int) -> list[str]:
    """What was waited for in an attempt; sending, which may or may not be, left out."""
    spans = [span for span in found.critical if span.name not in ("pd.route", "pd.send")]
    return [span.name for span in spans if span.attempt == attempt]


def outcomes(found: Partition, attempt: int) -> dict[str, str]:
    return {span.name: span.outcome for span in found.critical if span.attempt == attempt}


def sums_up(found: Partition) -> bool:
    assert found.to_first_s is not None and found.between_s is not None
    return abs(found.between_s) <= 0.1 * found.to_first_s


async def test_an_attempt_on_a_prefill_that_left_was_waited_for_and_is_told() -> None:
    async with cluster(prefills=2, **SLOW, **KEPT) as running:

        def computing() -> list[Any]:
            views = [p.view for p in running.prefills]
            return [view for view in views if any(t.state == COMPUTING for t in view.transfers())]

        async with AsyncClient(running.router.endpoint) as client:
            generation = ask(client)
            reading = asyncio.create_task(generation.collect())
            await until(lambda: bool(computing()))
            computing()[0].drain(0.0)
            answer = await reading
        assert len(answer.token_ids) == 12
        found = await told(running, generation.trace_id)
    assert path(found, 1) == ["pd.queue", "pd.prepare", "pd.queue", "pd.compute"]
    assert outcomes(found, 1)["pd.compute"] == "DRAINING"
    assert path(found, 2) == [*STAGES, *DECODING]
    assert set(outcomes(found, 2).values()) == {"ok"}
    assert len({span.instance for span in found.critical if span.name == "pd.compute"}) == 2
    assert sums_up(found)
    assert found.behind is not None


async def test_an_answer_that_goes_on_at_another_decode_had_its_first_token_before() -> None:
    async with cluster(decodes=2, **SLOW, **KEPT) as running:
        async with AsyncClient(running.router.endpoint) as client:
            generation, answer = ask(client), Answer()
            async for chunk in generation:
                answer.add(chunk)
                if len(answer.token_ids) == 3:
                    (busy,) = [d.view for d in running.decodes if d.view.transfers()]
                    busy.drain(0.0)
        assert len(answer.token_ids) == 12
        found = await told(running, generation.trace_id)
    assert path(found, 1) == path(found, 2) == [*STAGES, *DECODING]
    assert outcomes(found, 1)["pd.decode"] == "DRAINING"
    assert outcomes(found, 2)["pd.decode"] == "ok"
    # Only what came before the first token counts for it.
    first_computes = [s for s in found.critical if s.name == "pd.compute" and s.attempt == 1]
    assert found.stages["compute"] == pytest.approx(first_computes[0].duration_s)
    assert sums_up(found)
    assert found.behind is not None


async def test_of_a_request_that_failed_the_last_stage_says_why() -> None:
    once: dict[str, Any] = {"traces_kept": 64, "retry": False, "continuation": False}
    async with cluster(**SLOW, traces_kept=64, router_settings=once) as running:
        async with AsyncClient(running.router.endpoint) as client:
            generation = ask(client)
            reading = asyncio.create_task(generation.collect())
            view = running.prefills[0].view
            await until(lambda: any(t.state == COMPUTING for t in view.transfers()))
            view.drain(0.0)
            with pytest.raises(Fault) as raised:
                await reading
        assert raised.value.reason is Reason.DRAINING
        found = await told(running, generation.trace_id)
    assert found.to_first_s is None and found.behind is None
    assert [(span.name, span.outcome) for span in found.critical][-1] == ("pd.compute", "DRAINING")
