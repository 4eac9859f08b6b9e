"""Of a request that fails one line says so, on whichever instance, with its trace; and no line of
any request says what its prompt was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.decode.states import DecodeState
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.messages import sampling_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry.instance_log import LINES
from pd_grpc.telemetry.logs import LOGGER, HumanFormatter, JsonFormatter
from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from pd_grpc.testing.faults_wiring import injected
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.cluster import Cluster, cluster
from tests.system.asking import request
from tests.waiting import until

MARK = 29711
"""The token that every prompt of these tests consists of."""
WORD = "xyzzyplugh"
"""The word that every prompt of text consists of."""
TRACE = "ab" * 16
SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)


class Lines(logging.Handler):
    """Every record of the package, of debug too."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        self.trace = TRACE
        """Of the last request."""
        self.single: logging.LogRecord | None = None
        """The one line that the last failed request may have."""

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def about(self, trace: str, level: int = logging.INFO) -> list[logging.LogRecord]:
        """What was said of a request by its trace, at this level or a more severe one."""
        found = [r for r in self.records if getattr(r, "trace_id", None) == trace]
        return [r for r in found if r.levelno >= level]

    def of_transfer(self, transfer_id: str) -> list[logging.LogRecord]:
        """What was said of a transfer, whatever its trace, that is not of debug."""
        found = [r for r in self.records if getattr(r, "transfer_id", None) == transfer_id]
        return [r for r in found if r.levelno >= logging.INFO]

    def texts(self) -> list[str]:
        """All of it as it would be written, for people and for machines."""
        formatters = HumanFormatter(), JsonFormatter()
        return [each.format(record) for each in formatters for record in self.records]


@pytest.fixture(autouse=True)
def lines() -> Iterator[Lines]:
    """Of the whole test; in the end none may show a prompt."""
    logger = logging.getLogger(LOGGER)
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    if handler.single is not None:
        # Also of those who heard of it last, when the cluster has ended.
        assert handler.about(handler.trace) == [handler.single]
        if transfer_id := getattr(handler.single, "transfer_id", None):
            assert handler.of_transfer(transfer_id) == [handler.single]
    shown = [t for t in handler.texts() if WORD in t or re.search(rf"(?<!\w){MARK}(?!\w)", t)]
    assert shown == []
    unsigned = [t for r, t in zip(handler.records, handler.texts(), strict=False) if not of(r)]
    assert unsigned == []


def of(record: logging.LogRecord) -> str:
    """The instance that wrote a line."""
    return str(getattr(record, "instance", ""))


@dataclass
class Asked:
    """How a request ended for its client."""

    code: str = "OK"
    tokens: list[int] = field(default_factory=list)


async def asked(
    stub: inference_pb2_grpc.InferenceServiceStub,
    message: inference_pb2.GenerateRequest,
    timeout_s: float = 20.0,
    leave_after: int = 0,
    on_token: Callable[[], Awaitable[None]] | None = None,
    trace: str = TRACE,
) -> Asked:
    """Ask in a trace; leave after so many tokens, if any."""
    seen = Asked()
    traceparent = ("traceparent", f"00-{trace}-{'cd' * 8}-00")
    call = stub.Generate(message, timeout=timeout_s, metadata=(traceparent,))
    try:
        async for part in call:
            seen.tokens += part.token_ids
            if on_token is not None and part.token_ids:
                await on_token()
                on_token = None
            if leave_after and len(seen.tokens) >= leave_after:
                call.cancel()
                leave_after = 0
    except grpc.aio.AioRpcError as error:
        seen.code = error.code().name
    except asyncio.CancelledError:
        seen.code = "CANCELLED"
    return seen


def prompt(tokens: int = 40, sampling: Sampling = SAMPLING) -> inference_pb2.GenerateRequest:
    return request([MARK] * tokens, sampling)


async def one_line(lines: Lines) -> logging.LogRecord:
    """The line of the one request that failed; there may come no other."""
    await until(lambda: bool(lines.about(lines.trace)))
    (lines.single,) = lines.about(lines.trace)
    return lines.single


def words(times: int = 12, sampling: Sampling = SAMPLING) -> inference_pb2.GenerateRequest:
    """A prompt of text."""
    return inference_pb2.GenerateRequest(
        text=f"{WORD} " * times, sampling=sampling_to_proto(sampling)
    )


def says(line: logging.LogRecord, instance: str, reason: str) -> bool:
    return (of(line), getattr(line, "reason", None)) == (instance, reason)


@contextlib.asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[tuple[Cluster, Any]]:
    """A cluster and its stub."""
    async with cluster(**settings) as servers, servers.client() as stub:
        yield servers, stub
        # Nothing is kept of a request that has ended.
        kept: list[Sized] = [d.runtime.requests for d in servers.decodes]
        kept += [p.runtime.callers for p in servers.prefills]
        await until(lambda: not any(len(each) for each in kept))


async def test_a_request_that_succeeds_has_no_line(lines: Lines) -> None:
    async with asking() as (_, stub):
        assert (await asked(stub, prompt())).code == "OK"
    assert lines.about(TRACE, logging.DEBUG) == []


async def test_a_bad_request_has_its_line_on_the_router(lines: Lines) -> None:
    async with asking() as (_, stub):
        bad = prompt()
        bad.sampling.top_p = 7.0
        assert (await asked(stub, bad)).code == "INVALID_ARGUMENT"
        bad = inference_pb2.GenerateRequest(text=WORD)
        bad.sampling.temperature = -1.0
        await until(lambda: bool(lines.about(TRACE)))
        line = await one_line(lines)
        lines.records.clear()
        assert (await asked(stub, bad)).code == "INVALID_ARGUMENT"
        await one_line(lines)
    assert says(line, "router", "BAD_REQUEST") and line.levelno == logging.INFO


async def test_a_token_that_the_model_has_not_is_not_named(lines: Lines) -> None:
    async with asking(sim_vocab=20000) as (_, stub):
        assert (await asked(stub, prompt())).code == "INVALID_ARGUMENT"
        assert says(await one_line(lines), "router", "BAD_REQUEST")


async def test_a_request_too_large_for_any_pool_has_one_line(lines: Lines) -> None:
    async with asking() as (_, stub):
        huge = prompt(sampling=Sampling(max_tokens=9000, temperature=0.0))
        assert (await asked(stub, huge)).code == "INVALID_ARGUMENT"
        line = await one_line(lines)
    assert says(line, "router", "TOO_LARGE")
    assert getattr(line, "transfer_id", "") and getattr(line, "attempt", 0) == 1


async def test_a_client_that_leaves_has_one_line_on_the_router(lines: Lines) -> None:
    async with asking(sim_time_scale=5.0) as (_, stub):
        assert (await asked(stub, words(sampling=LONG), leave_after=3)).code == "CANCELLED"
        line = await one_line(lines)
    assert says(line, "router", "CLIENT_GONE") and line.levelno == logging.INFO


async def test_a_client_that_leaves_before_the_first_token_has_one_line(lines: Lines) -> None:
    async with asking(sim_time_scale=50.0) as (servers, stub):
        going = asyncio.create_task(asked(stub, prompt(2000)))
        await until(lambda: bool(servers.prefills[0].view.transfers()))
        going.cancel()
        await going
        assert says(await one_line(lines), "router", "CLIENT_GONE")


async def test_a_deadline_has_one_line_on_the_router_that_names_the_stage(lines: Lines) -> None:
    async with asking(hop_margin_s=1.0, router_settings={"hop_margin_s": 1.0}) as (servers, stub):
        pool = servers.decodes[0].pool
        taken = pool.reserve(pool.total, owner="the test")
        try:
            late = await asked(stub, prompt(), timeout_s=4.0)
        finally:
            taken.release()
            servers.decodes[0].runtime.wake()
        assert late.code == "DEADLINE_EXCEEDED"
        line = await one_line(lines)
    assert says(line, "router", "STAGE_DEADLINE") and line.levelno == logging.INFO
    assert "'allocate'" in line.getMessage()


async def late_amid_answer(stub: Any, lines: Lines) -> logging.LogRecord:
    """The line of a request whose time is over in the middle of its answer. One that has no token
    by then, as on a slow machine, is followed by another with twice the time."""
    timeout_s = 2.0
    while True:
        lines.trace = f"{int(timeout_s):032x}"
        late = await asked(stub, prompt(sampling=LONG), timeout_s, trace=lines.trace)
        assert late.code == "DEADLINE_EXCEEDED"
        line = await one_line(lines)
        if late.tokens:
            return line
        timeout_s *= 2


async def test_a_deadline_in_mid_answer_has_one_line(lines: Lines) -> None:
    margin: Any = {"hop_margin_s": 1.0, "router_settings": {"hop_margin_s": 1.0}}
    async with asking(sim_time_scale=10.0, **margin) as (_, stub):
        assert says(await late_amid_answer(stub, lines), "router", "STAGE_DEADLINE")


async def test_a_full_queue_has_one_line(lines: Lines) -> None:
    settings = {"decode_settings": {"allocate_queue": 1}, "router_settings": {"retry_wait_s": 0.0}}
    async with asking(**settings) as (servers, stub):
        d = servers.decodes[0]
        taken = d.pool.reserve(d.pool.total, owner="the test")
        try:
            waiting = asyncio.create_task(asked(stub, prompt(), trace="cd" * 16))
            await until(lambda: d.machine.ledger.counts[DecodeState.WAITING] == 1)
            refused = await asked(stub, prompt(), timeout_s=5.0)
        finally:
            taken.release()
            d.runtime.wake()
        assert (await waiting).code == "OK"
        assert refused.code == "RESOURCE_EXHAUSTED"
        assert says(await one_line(lines), "router", "QUEUE_FULL")


def _raise(*_: object, **__: object) -> object:
    raise RuntimeError("the matrix is singular")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_raises_has_its_line_where_it_runs(
    role: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking() as (servers, stub):
        server = (servers.prefills if role == "prefill" else servers.decodes)[0]
        monkeypatch.setattr(server.engine, role, _raise)
        assert (await asked(stub, words())).code == "INTERNAL"
        line = await one_line(lines)
        monkeypatch.undo()
    assert says(line, server.name, "ENGINE_ERROR") and line.levelno == logging.WARNING
    raised = [r for r in lines.records if r.exc_info and of(r) == server.name]
    assert raised and all(r.levelno == logging.ERROR for r in raised)


def _spoiled(data: bytes, chance: random.Random) -> bytes:
    """Its last byte is one of the KV's."""
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_corrupt_kv_has_its_line_on_d(lines: Lines) -> None:
    injector = Injector()
    rule = Rule(Kind.CORRUPT, "Transfer", Direction.REQUEST, messages={2}, damage=_spoiled)
    injector.add(rule)
    async with asking(prefill_wire=injected(injector)) as (_, stub):
        assert (await asked(stub, words())).code == "UNAVAILABLE"
        assert injector.strikes(rule) == 1
        assert says(await one_line(lines), "d0", "KV_CORRUPT")


async def test_an_operator_who_ends_a_request_has_one_line(lines: Lines) -> None:
    async with asking(sim_time_scale=5.0) as (servers, stub):

        async def end() -> None:
            (transfer,) = servers.decodes[0].view.transfers()
            servers.decodes[0].view.release(transfer.ref.transfer_id, 0, "the test wants it so")

        ended = await asked(stub, prompt(sampling=LONG), on_token=end)
        assert ended.code == "ABORTED"
        line = await one_line(lines)
    assert says(line, "router", "RELEASED") and line.levelno == logging.INFO
    assert "the test wants it so" in line.getMessage()


async def test_a_request_that_goes_on_elsewhere_has_the_failure_and_the_try(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    injector = Injector()
    rule = Rule(Kind.CORRUPT, "Transfer", Direction.REQUEST, {2}, calls={1}, damage=_spoiled)
    injector.add(rule)
    async with asking(prefills=2, decodes=2, prefill_wire=injected(injector)) as (_, stub):
        assert (await asked(stub, prompt())).code == "OK"
        failed, tried = lines.about(TRACE)
    assert getattr(failed, "reason", "") == getattr(tried, "reason", "") == "KV_CORRUPT"
    assert of(failed) in ("d0", "d1") and getattr(failed, "attempt", 0) == 1
    assert of(tried) == "router" and getattr(tried, "attempt", 0) == 2
    assert getattr(tried, "event", "") == "request_elsewhere"


async def test_without_a_router_each_call_that_fails_has_its_line(lines: Lines) -> None:
    async with asking(aggregated=True) as (servers, _):
        config = RouterConfig()
        async with rpc.aio_channel(servers.decodes[0].endpoint, config, config) as channel:
            direct = inference_pb2_grpc.InferenceServiceStub(channel)
            huge = prompt(sampling=Sampling(max_tokens=9000, temperature=0.0))
            assert (await asked(direct, huge)).code == "INVALID_ARGUMENT"
            line = await one_line(lines)
    assert says(line, "d0", "TOO_LARGE")


async def test_an_aggregated_d_leaves_what_the_router_hears_to_the_router(lines: Lines) -> None:
    async with asking(aggregated=True, sim_time_scale=10.0) as (_, stub):
        late = await asked(stub, prompt(sampling=LONG), timeout_s=1.0)
        assert late.code == "DEADLINE_EXCEEDED"
        assert says(await one_line(lines), "router", "STAGE_DEADLINE")


async def test_each_of_many_that_leave_or_run_out_of_time_has_one_line(lines: Lines) -> None:
    chance = random.Random(5)
    traces = [f"{0xABC000 + n:032x}" for n in range(LINES - 2)]
    settings = {"sim_time_scale": 3.0, "prefills": 2, "decodes": 2}

    async def ask(stub: inference_pb2_grpc.InferenceServiceStub, trace: str) -> Asked:
        message = prompt(chance.randint(1, 400), LONG)
        if chance.random() < 0.5:
            return await asked(stub, message, timeout_s=chance.uniform(0.15, 2.0), trace=trace)
        going = asyncio.create_task(asked(stub, message, trace=trace))
        await asyncio.wait([going], timeout=chance.uniform(0.0, 1.5))
        going.cancel()
        return await going

    async with asking(**settings) as (_, stub):
        ends = await asyncio.gather(*(ask(stub, trace) for trace in traces))
    assert {end.code for end in ends} == {"DEADLINE_EXCEEDED", "CANCELLED"}
    # One that was cancelled at once may never have left the client: many, where that is slow.
    heard = {trace for trace in traces if lines.about(trace, logging.DEBUG)}
    assert len(heard) > len(traces) / 8
    assert {len(lines.about(trace)) for trace in heard} == {1}
    assert {of(line) for trace in heard for line in lines.about(trace)} == {"router"}


async def test_a_flood_of_bad_requests_is_cut_and_counted(lines: Lines) -> None:
    async with asking() as (_, stub):
        bad = prompt()
        bad.sampling.top_p = 7.0
        for _ in range(LINES + 25):
            assert (await asked(stub, bad)).code == "INVALID_ARGUMENT"
    failed = [r for r in lines.records if getattr(r, "event", "") == "request_failed"]
    assert len(failed) == LINES
    told = [r.getMessage() for r in lines.records if getattr(r, "event", "") == "lines_left_out"]
    assert told == ["25 lines of request_failed BAD_REQUEST were left out"]


async def test_instances_and_their_links_have_lines_of_their_own(lines: Lines) -> None:
    async with asking() as (_, stub):
        await asked(stub, prompt())
    events = [(of(r), getattr(r, "event", ""), getattr(r, "peer", "")) for r in lines.records]
    for name in ("p0", "d0", "router"):
        mine = [event for instance, event, _ in events if instance == name]
        assert mine.index("instance_started") < mine.index("instance_ready")
        assert mine[-1] == "instance_stopped"
    assert ("d0", "session_opened", "p0") in events
    assert {peer for i, event, peer in events if event == "peer_ready"} == {"p0", "d0"}
    assert [i for i, event, _ in events if event == "session_lost" and i == "p0"] == []
    assert not [r for r in lines.records if r.levelno > logging.INFO]
