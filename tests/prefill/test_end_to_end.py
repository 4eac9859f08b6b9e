"""P against real decode instances, over sockets, on the sim engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from pd_grpc.prefill.server import PrefillServer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    types_pb2,
)
from tests.lines import line_to
from tests.prefill.cluster import (
    Cluster,
    Outcome,
    answer_to,
    request_to,
    running,
)
from tests.waiting import LIMIT_S, until

NOBODY = "127.0.0.1:1"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as made:
        yield made


def kinds(outcome: Outcome) -> list[str]:
    return [str(message.WhichOneof("event")) for message in outcome.messages]


def reason(outcome: Outcome) -> Reason:
    assert isinstance(outcome.fault, Fault), outcome.fault
    return outcome.fault.reason


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 500])
async def test_d_goes_on_from_the_kv_that_p_computed(cluster: Cluster, tokens: int) -> None:
    p, d = await cluster.prefill(), await cluster.decode()
    request = request_to(d, tokens=tokens)
    prefill, generate = await cluster.run(p, d, request)
    assert generate.fault is None and prefill.fault is None
    assert generate.tokens == answer_to(request)
    assert kinds(prefill)[0] == "queued" and kinds(prefill)[-1] == "handed_off"
    handed_off = prefill.messages[-1].handed_off
    assert handed_off.decode.name == d.name
    assert (handed_off.usage.prompt_tokens, handed_off.usage.completion_tokens) == (tokens, 1)


async def test_many_requests_at_once_all_get_their_own_answers(cluster: Cluster) -> None:
    p, d = await cluster.prefill(num_blocks=64), await cluster.decode(num_blocks=64)
    requests = [
        request_to(d, tokens=20 + 7 * i, seed=i if i % 2 else None, random_seed=i)
        for i in range(16)
    ]
    outcomes = await asyncio.gather(*(cluster.run(p, d, request) for request in requests))
    for request, (prefill, generate) in zip(requests, outcomes, strict=True):
        assert prefill.fault is None and generate.fault is None
        assert generate.tokens == answer_to(request)


async def test_tokens_the_client_has_are_continued(cluster: Cluster) -> None:
    p, d = await cluster.prefill(), await cluster.decode()
    whole = request_to(d, tokens=30, max_tokens=9)
    said = answer_to(whole)
    rest = request_to(d, tokens=30, max_tokens=9, generated=tuple(said[:4]))
    prefill, generate = await cluster.run(p, d, rest)
    assert generate.tokens == said[4:]
    assert prefill.messages[-1].handed_off.usage.completion_tokens == 5
    assert (generate.usage.prompt_tokens, generate.usage.completion_tokens) == (30, len(said))


async def test_one_token_is_answered_without_kv(cluster: Cluster) -> None:
    p, d = await cluster.prefill(), await cluster.decode(num_blocks=16)
    occupied = d.pool.reserve(d.pool.free, owner="the test")
    request = request_to(d, tokens=40, max_tokens=1)
    prefill, generate = await cluster.run(p, d, request)
    occupied.release()
    assert generate.tokens == answer_to(request)
    assert generate.finish == types_pb2.FINISH_REASON_LENGTH
    assert kinds(prefill)[-1] == "handed_off"


async def test_d_that_cannot_be_reached_is_an_error_at_once(cluster: Cluster) -> None:
    """S7"""
    p = await cluster.prefill(connect_s=90.0)
    outcome = await asyncio.wait_for(cluster.run_prefill(p, request_to(NOBODY)), LIMIT_S)
    assert reason(outcome) is Reason.DECODE_LOST


async def test_another_d_is_tried_after_the_caller_was_told(cluster: Cluster) -> None:
    p, d = await cluster.prefill(), await cluster.decode()
    request = request_to(NOBODY, d)
    prefill, generate = await cluster.run(p, d, request)
    assert kinds(prefill)[:2] == ["queued", "placing"]
    assert prefill.messages[1].placing.decode.endpoint == d.endpoint
    assert generate.tokens == answer_to(request)


async def test_a_caller_that_leaves_frees_both_sides(cluster: Cluster) -> None:
    """F34, F24: in mid-prefill, the compute stops by the next chunk."""
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode()
    request = request_to(d, tokens=600)
    generate = asyncio.create_task(cluster.run_generate(d, request))
    stub = prefill_pb2_grpc.PrefillServiceStub(cluster.channel(p.endpoint))
    call = stub.Prefill(request.prefill(), timeout=60)
    async for message in call:
        if message.WhichOneof("event") == "progress":
            break
    call.cancel()
    assert reason(await asyncio.wait_for(generate, LIMIT_S)) is Reason.CLIENT_GONE
    await cluster.all_returned(within_s=1)


async def test_ds_client_hears_the_cause_though_the_session_was_broken(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode(grace_s=2.0)
    async with line_to(d.endpoint) as line:
        request = request_to(line.endpoint, tokens=600)
        generate = asyncio.create_task(cluster.run_generate(d, request))
        prefill = asyncio.create_task(cluster.run_prefill(p, request))
        await _computing(p)
        await line.cut()
        await until(lambda: not p.machine.conversations.is_open(line.endpoint))
        prefill.cancel()
        await until(lambda: not p.machine.requests.in_flight)
        await line.mend()
        assert reason(await asyncio.wait_for(generate, LIMIT_S)) is Reason.CLIENT_GONE
        await asyncio.gather(prefill, return_exceptions=True)
        await cluster.all_returned()
        await cluster.stop(p)


async def test_a_client_leg_that_leaves_ends_the_prefill(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode()
    request = request_to(d, tokens=600)
    generate = asyncio.create_task(cluster.run_generate(d, request))
    prefill = asyncio.create_task(cluster.run_prefill(p, request))
    await _computing(p)
    generate.cancel()
    assert reason(await asyncio.wait_for(prefill, LIMIT_S)) is Reason.CLIENT_GONE


async def test_a_deadline_in_mid_prefill_names_the_stage(cluster: Cluster) -> None:
    # It answers before its caller's own timer, on a busy machine too.
    p = await cluster.prefill(sim_time_scale=20.0, hop_margin_s=1.5)
    d = await cluster.decode()
    prefill = await cluster.run_prefill(p, request_to(d, tokens=900), timeout_s=4.0)
    assert isinstance(prefill.fault, Fault)
    assert prefill.fault.reason is Reason.STAGE_DEADLINE
    assert prefill.fault.metadata["stage"] == "compute"


async def test_requests_that_do_not_fit_d_at_once_wait_for_each_other(cluster: Cluster) -> None:
    p, d = await cluster.prefill(), await cluster.decode(num_blocks=24)
    requests = [request_to(d, tokens=60, random_seed=i) for i in range(6)]
    outcomes = await asyncio.gather(*(cluster.run(p, d, request) for request in requests))
    assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in requests]


async def test_a_full_d_holds_up_none_but_its_own(cluster: Cluster) -> None:
    """S2"""
    p = await cluster.prefill(prepare_window=4)
    full, free = await cluster.decode(num_blocks=24), await cluster.decode()
    full.pool.reserve(full.pool.free, owner="the test")
    stuck = [
        asyncio.create_task(cluster.run_prefill(p, request_to(full, random_seed=i)))
        for i in range(40)
    ]
    pool = p.machine.placement.pool
    await until(lambda: pool.waiting_for(full.endpoint) == 36)
    assert pool.in_flight == 4
    requests = [request_to(free, random_seed=100 + i) for i in range(8)]
    runs = asyncio.gather(*(cluster.run(p, free, r) for r in requests))
    outcomes = await asyncio.wait_for(runs, LIMIT_S)
    assert [generate.tokens for _, generate in outcomes] == [answer_to(r) for r in requests]
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    for holding in full.pool.holdings():
        holding.release()


async def test_a_client_that_made_both_calls_hears_of_ds_refusal_on_both(
    cluster: Cluster,
) -> None:
    p, full = await cluster.prefill(), await cluster.decode(allocate_queue=1)
    occupied = full.pool.reserve(full.pool.free, owner="the test")
    waiting = asyncio.create_task(cluster.run_prefill(p, request_to(full)))
    await until(lambda: len(full.view.transfers()) == 1)
    legs = cluster.run(p, full, request_to(full, random_seed=2))
    prefill, generate = await asyncio.wait_for(legs, LIMIT_S)
    assert reason(prefill) is reason(generate) is Reason.QUEUE_FULL
    waiting.cancel()
    await asyncio.wait([waiting])
    occupied.release()


async def test_a_d_that_stops_ends_the_transfers_it_had(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode()
    prefill = asyncio.create_task(cluster.run_prefill(p, request_to(d, tokens=600)))
    await _computing(p)
    await cluster.stop(d)
    outcome = await asyncio.wait_for(prefill, LIMIT_S)
    assert reason(outcome) in (Reason.DECODE_LOST, Reason.DRAINING)


async def test_a_d_that_takes_the_place_of_another_serves_without_help(cluster: Cluster) -> None:
    """S14, F22"""
    p, d = await cluster.prefill(), await cluster.decode(name="d")
    await cluster.run(p, d, request_to(d))
    port = int(d.endpoint.rpartition(":")[2])
    await cluster.stop(d)
    again = await cluster.decode(name="d", port=port)
    request = request_to(again, random_seed=2)
    # P learns of the end in its own time: until then D is lost, which is said at once.
    await until(lambda: p.machine.conversations.get(again.endpoint) is None)
    prefill, generate = await cluster.run(p, again, request)
    assert prefill.fault is None
    assert generate.tokens == answer_to(request)


async def test_the_same_transfer_twice_at_once_is_refused(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=0.2), await cluster.decode()
    request = request_to(d, tokens=200)
    first = asyncio.create_task(cluster.run(p, d, request))
    await _computing(p)
    second = await cluster.run_prefill(p, request)
    assert reason(second) is Reason.DUPLICATE_TRANSFER
    prefill, generate = await first
    assert prefill.fault is None and generate.tokens == answer_to(request)


async def test_a_d_with_another_layout_is_refused(cluster: Cluster) -> None:
    p, d = await cluster.prefill(), await cluster.decode(block_size=8)
    outcome = await cluster.run_prefill(p, request_to(d))
    assert isinstance(outcome.fault, Fault)
    assert outcome.fault.reason is Reason.LAYOUT_MISMATCH
    assert "block_size" in outcome.fault.message


async def test_an_operator_sees_and_releases_a_transfer(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode()
    request = request_to(d, tokens=600)
    prefill = asyncio.create_task(cluster.run_prefill(p, request))
    await _computing(p)
    admin = admin_pb2_grpc.AdminServiceStub(cluster.channel(p.endpoint))
    listed = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
    (info,) = listed.transfers
    assert info.state == types_pb2.TRANSFER_STATE_COMPUTING
    assert (info.peer, info.next_timer, info.prompt_tokens) == (d.name, "budget", 600)
    server = await admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=60)
    assert sum(count.blocks for count in server.server.blocks) == p.pool.total
    released = await admin.ReleaseTransfer(
        admin_pb2.ReleaseTransferRequest(transfer_id=request.ref.transfer_id, reason="tests"),
        timeout=60,
    )
    assert released.transfer.state == types_pb2.TRANSFER_STATE_FAILED
    assert reason(await prefill) is Reason.RELEASED


async def test_a_drain_finishes_what_runs_and_refuses_what_is_new(cluster: Cluster) -> None:
    p, d = await cluster.prefill(sim_time_scale=0.2), await cluster.decode()
    request = request_to(d, tokens=200)
    running_ = asyncio.create_task(cluster.run(p, d, request))
    await _computing(p)
    assert p.drain() == 1
    assert reason(await cluster.run_prefill(p, request_to(d))) is Reason.DRAINING
    prefill, generate = await running_
    assert prefill.fault is None and generate.tokens == answer_to(request)
    await asyncio.wait_for(p.drained(), LIMIT_S)


async def test_stopping_in_mid_prefill_leaves_no_block_behind(cluster: Cluster) -> None:
    """S15, F53"""
    p, d = await cluster.prefill(sim_time_scale=1.0), await cluster.decode()
    tasks = [
        asyncio.create_task(cluster.run(p, d, request_to(d, tokens=400, random_seed=i)))
        for i in range(3)
    ]
    await _computing(p)
    await asyncio.wait_for(cluster.stop(p), LIMIT_S)
    await asyncio.gather(*tasks)


async def test_generate_on_a_prefill_instance_is_not_supported(cluster: Cluster) -> None:
    p = await cluster.prefill()
    stub = inference_pb2_grpc.InferenceServiceStub(cluster.channel(p.endpoint))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=60):
            pass
    fault = rpc.read_error(caught.value)
    assert isinstance(fault, Fault) and fault.reason is Reason.FEATURE
    info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=60)
    assert (info.model, info.vocab_size, info.layout.block_size) == ("sim", 32000, 4)


async def _computing(p: PrefillServer) -> None:
    """Wait until a request has passed its first chunk."""
    flying = p.machine.requests.in_flight
    await until(lambda: any(record.computed for record in flying.values()))
