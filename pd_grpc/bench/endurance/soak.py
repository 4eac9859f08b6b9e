"""The soak: a router with 2P and 2D on the sim engine, harmed all the time, each answer checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pd_grpc.bench.endurance import plan as planning
from pd_grpc.bench.endurance.asking import Right, ask, generate_request, wrong
from pd_grpc.bench.endurance.detection import detection_times
from pd_grpc.bench.endurance.fleet import ROUTER, Fleet, FleetPlan, running_fleet
from pd_grpc.bench.endurance.harm import Harmer
from pd_grpc.bench.endurance.leaks import left_over
from pd_grpc.bench.endurance.memory import MemorySeries
from pd_grpc.bench.endurance.plan import HEARTBEAT_S, Manner, PlannedRequest, Slot
from pd_grpc.bench.endurance.recovery import recovery_of
from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.endurance.stalls import Stalls
from pd_grpc.bench.endurance.tally import Tally
from pd_grpc.bench.statistics import percentile
from pd_grpc.bench.trace import read_trace
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.engine.text import Detokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, Sizes, Timeouts
from pd_grpc.v1 import inference_pb2_grpc

Tell = Callable[[str], None]

SETTINGS: Mapping[str, Any] = {
    "engine": "sim",
    "sim_vocab": planning.VOCAB,
    # A pool that some forty requests fill, so that some wait for blocks.
    "num_blocks": 256,
    "chunk_tokens": 64,
    "chunk_bytes": 4096,
    "sim_time_scale": 2.0,
    "heartbeat_s": HEARTBEAT_S,
    "lease_s": 3 * HEARTBEAT_S,
    "grace_s": 0.5,
    "kv_progress_s": 4.0,
    "first_token_s": 5.0,
    "attach_s": 2.0,
    "connect_s": 1.0,
    "tombstone_s": 10.0,
    "request_budget_s": planning.BUDGET_S,
}
"""Of P and D: the protocol's times, shortened."""
ROUTER_SETTINGS: Mapping[str, Any] = {
    "engine": "sim",
    "sim_vocab": planning.VOCAB,
    "heartbeat_s": HEARTBEAT_S,
    "grace_s": 0.5,
    "connect_s": 1.0,
    "tombstone_s": 10.0,
    # A machine that stands still for two seconds takes all of its instances for lost, and has them
    # back at once.
    "retry_wait_s": 8.0,
}
GROWTH_MOST_KIB = 1024
"""What `rss_growth_kib_per_1000` is to stay under."""
STALLED_FROM_S = HEARTBEAT_S
"""On a machine that stood still for as long, what the router does not notice is not held against
it."""
_TELL_SLOTS = 25
_TRACE_MINUTES = 10.0


@dataclass
class Soak:
    """A run under way."""

    fleet: Fleet
    stub: inference_pb2_grpc.InferenceServiceStub
    engine: EngineConfig
    tell: Tell
    tally: Tally = field(default_factory=Tally)
    memory: MemorySeries = field(default_factory=MemorySeries)
    sent: int = 0
    _asking: set[asyncio.Task[None]] = field(default_factory=set)

    async def run_slot(self, slot: Slot, harmer: Harmer) -> None:
        """Send its requests and do its harm; returns when its time is over and all is right again,
        while requests may still be under way. WorkerLost; and it raises what kept a request from
        being judged, for a run that does not judge all says nothing."""
        began = time.monotonic()
        harm = asyncio.create_task(self._harm(slot, harmer, began))
        try:
            for request in slot.requests:
                await _until(began + request.at_s)
                self.send(request, harmer)
            await _until(began + planning.SLOT_S)
        finally:
            await harm
        ended = {task for task in self._asking if task.done()}
        self._asking -= ended
        await asyncio.gather(*ended)
        self.memory.add(self.sent, self.fleet.memory_kib())

    def send(self, request: PlannedRequest, harmer: Harmer) -> None:
        """Send one, which is judged when it has ended."""
        self._asking.add(asyncio.create_task(self._one(request, harmer)))
        self.sent += 1

    async def finish(self) -> None:
        """Wait for every request that is under way, each of which ends in its time. It raises what
        kept one from being judged."""
        await asyncio.gather(*self._asking)

    async def _harm(self, slot: Slot, harmer: Harmer, began: float) -> None:
        await _until(began + slot.fault.at_s)
        await harmer.do(slot.fault)

    async def _one(self, request: PlannedRequest, harmer: Harmer) -> None:
        sampling = request.sampling
        if request.manner is Manner.INVALID:
            sampling = replace(sampling, temperature=-1.0)
        message = generate_request(request.name, request.prompt, request.as_text, sampling)
        leaves = request.leaves_after_s if request.manner is Manner.CANCEL else None
        reply = await ask(self.stub, message, request.budget_s, leaves)
        mistake = wrong(reply, self._right(request))
        bad = self.tally.add(request.name, request.manner, reply, mistake, harmer.now_wrong)
        if bad:
            self.tell(bad)

    def _right(self, request: PlannedRequest) -> Right:
        if request.manner is Manner.INVALID:
            return Right((), "", 0)
        token_ids = sim_answer(request.prompt, request.sampling, self.engine)
        return right_answer(request, token_ids)


def right_answer(request: PlannedRequest, token_ids: list[int]) -> Right:
    """These tokens with their text, up to the stop string where there is one."""
    sampling = request.sampling
    text = Detokenizer(SimTokenizer(planning.VOCAB), sampling.stop, sampling.min_tokens)
    shown = text.push(token_ids) + text.finish()
    return Right(token_ids, shown, len(request.prompt))


async def soak(requests: int, seed: int, tell: Tell) -> dict[str, Any]:
    """Run it: the report, as one JSON object. WorkerLost when a process cannot be brought back."""
    began = time.monotonic()
    trace = read_trace(None, _TRACE_MINUTES)
    fleet_plan = FleetPlan(settings=SETTINGS, router_settings=ROUTER_SETTINGS, links=True)
    async with running_fleet(fleet_plan) as fleet, Stalls().watched() as stalls:
        recovery = recovery_of(await fleet.server_info(ROUTER))
        tell(f"the router {recovery.in_words}")
        async with rpc.aio_channel(fleet.router.endpoint, Timeouts(), Sizes()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            run = Soak(fleet, stub, EngineConfig(**_engine_settings()), tell)
            harmer = Harmer(fleet)
            changes = []
            for number, slot in enumerate(planning.plan_slots(requests, seed, trace), 1):
                await run.run_slot(slot, harmer)
                changes += await fleet.readiness_changes()
                if number % _TELL_SLOTS == 0:
                    tell(_progress(run, harmer, time.monotonic() - began))
            await run.finish()
            changes += await fleet.readiness_changes()
        left = await left_over(fleet)
        recovery = recovery_of(await fleet.server_info(ROUTER))
    times, unnoticed = detection_times(harmer.noticeable, changes)
    growth = run.memory.growth_kib_per_1000()
    return {
        "soak": "2P2D and a router on the sim engine, one thing wrong at a time",
        "seed": seed,
        "sent": run.sent,
        **run.tally.figures(),
        "leaked_blocks": left.blocks + harmer.held_after_drain,
        "leaked_transfers": left.transfers,
        "left_over": list(left.words),
        "recovery": recovery.switched_on,
        "recovered_by_retry": recovery.retried,
        "recovered_by_continuation": recovery.continued,
        "faults_injected": sum(harmer.done.values()),
        "faults_by_kind": {kind.value: n for kind, n in sorted(harmer.done.items())},
        "p99_detect_s": percentile(times, 0.99) if times else None,
        "detections": len(times),
        "undetected": unnoticed,
        "stall_max_s": stalls.longest_s,
        "rss_growth_kib_per_1000": max(growth.values(), default=None),
        "rss_growth_by_process": growth,
        "told": run.tally.told,
        "settings": {**SETTINGS, "router": dict(ROUTER_SETTINGS)},
        **made_on(),
        "took_s": time.monotonic() - began,
    }


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What a report says that must not be, in words; empty when all is well. Where the router does
    not recover, requests may fail whose instance was harmed."""
    found = [
        f"{report[figure]} {figure}"
        for figure in ("hung", "wrong_tokens", "leaked_blocks", "leaked_transfers")
        if report[figure]
    ]
    if report["requests"] != report["sent"]:
        found.append(f"{report['requests']} requests of {report['sent']} were judged")
    if report["recovery"] and report["failed_by_code"]:
        found.append(f"requests failed: {report['failed_by_code']}")
    if report["undetected"] and report["stall_max_s"] < STALLED_FROM_S:
        found.append(f"not noticed: {', '.join(report['undetected'])}")
    growth = report["rss_growth_kib_per_1000"]
    if growth is not None and growth >= GROWTH_MOST_KIB:
        found.append(f"rss_growth_kib_per_1000 {growth:.0f} is not under {GROWTH_MOST_KIB}")
    return found


def _engine_settings() -> dict[str, Any]:
    return {name: SETTINGS[name] for name in SETTINGS if name in EngineConfig.model_fields}


def _progress(run: Soak, harmer: Harmer, seconds: float) -> str:
    figures = run.tally.figures()
    failed = sum(figures["failed_by_code"].values())
    return (
        f"{seconds:.0f} s: {figures['requests']} requests, {sum(harmer.done.values())} faults, "
        f"{failed} failed, {figures['hung']} hung, {figures['wrong_tokens']} wrong"
    )


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
