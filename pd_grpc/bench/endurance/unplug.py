"""Pulling the plug: streams go on while one P or D after another is killed and comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from pd_grpc.bench.endurance.asking import How, Reply, ask, generate_request, wrong
from pd_grpc.bench.endurance.fleet import ROUTER, Fleet, FleetPlan, running_fleet
from pd_grpc.bench.endurance.leaks import left_over
from pd_grpc.bench.endurance.questions import ModelQuestions, Questions, SimQuestions
from pd_grpc.bench.endurance.recovery import recovery_of
from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.statistics import percentile
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.v1 import inference_pb2_grpc

Tell = Callable[[str], None]

MOST_TOLD = 50
GAP_MOST_S = 3.0
"""What `gap_p99_s` is to stay under."""
_BUDGET_S = 300.0
_STARTS_EVERY_S = 0.02
_LOADS_WITHIN_S = 120.0
_NONE_OF = ("broken_streams", "wrong_tokens", "leaked_blocks", "leaked_transfers")


@dataclass(frozen=True)
class UnplugScope:
    """`streams` are under way at any time; each that ends is followed by another until `seconds`
    are over. One of the four is killed every `every_s`, or as soon as the one before it is back,
    and is started again `away_s` later. The streams go on until there were `least_kills`, however
    long a machine takes to bring an instance back."""

    engine: str = "sim"
    streams: int = 200
    seconds: float = 300.0
    every_s: float = 3.0
    away_s: float = 0.5
    seed: int = 1
    least_kills: int = 1
    sim_decode_scale: float = 20.0
    """How slow D is with the sim engine: at this scale each of a hundred streams gets four tokens a
    second, or some more."""

    @classmethod
    def of(cls, engine: str, quick: bool, seed: int) -> UnplugScope:
        """The sizes that an engine can bear on a small machine."""
        scope = cls(engine=engine, seed=seed, seconds=30.0 if quick else 300.0)
        if engine == "sim":
            return scope
        # A process takes seconds to load the model.
        return cls(engine, 8, 60.0 if quick else 300.0, every_s=15.0, seed=seed)


@dataclass
class Unplug:
    """A run under way."""

    scope: UnplugScope
    fleet: Fleet
    questions: Questions
    stub: inference_pb2_grpc.InferenceServiceStub
    killed: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    broken: int = 0
    wrong: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)
    _over: bool = False
    """No stream is followed by another any more."""

    async def run(self, tell: Tell) -> None:
        """All streams and all kills; returns when the last stream has ended. WorkerLost."""
        ends_at = time.monotonic() + self.scope.seconds
        lanes = [asyncio.create_task(self._lane(stream)) for stream in range(self.scope.streams)]
        try:
            await self._kill_until(ends_at, tell)
            await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
            self._over = True
            tell("waiting for the last streams")
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.wait(lanes)

    async def _kill_until(self, ends_at: float, tell: Tell) -> None:
        draw = random.Random(self.scope.seed)
        at = time.monotonic() + self.scope.every_s
        while at < ends_at or self.killed.total() < self.scope.least_kills:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            began = time.monotonic()
            name = draw.choice(sorted(self.fleet.units))
            await self.fleet.kill(name)
            self.killed[name] += 1
            await asyncio.sleep(self.scope.away_s)
            await self.fleet.bring_back(name)
            await self.fleet.until_ready()
            back_s = time.monotonic() - began
            tell(
                f"{name} was killed and is back after {back_s:.1f} s: {len(self.gaps_s)} streams "
                f"have ended, {self.broken} broken, {self.wrong} wrong"
            )
            at = max(at + self.scope.every_s, time.monotonic())

    async def _lane(self, stream: int) -> None:
        await asyncio.sleep(stream * _STARTS_EVERY_S)
        for number in count():
            if self._over:
                return
            question = self.questions.question(stream, number)
            name = f"u{self.scope.seed}-{stream}-{number}"
            message = generate_request(name, question.prompt, "", question.sampling)
            reply = await ask(self.stub, message, _BUDGET_S)
            self._count(name, reply, wrong(reply, self.questions.right(question)))

    def _count(self, name: str, reply: Reply, mistake: str) -> None:
        self.gaps_s.append(reply.gap_s)
        self.tokens += len(reply.token_ids)
        self.wrong += bool(mistake)
        broken = reply.how is not How.COMPLETE
        self.broken += broken
        if (broken or mistake) and len(self.told) < MOST_TOLD:
            self.told.append(
                {
                    "stream": name,
                    "how": reply.how.value,
                    "wrong": mistake,
                    "fault": "" if reply.fault is None else str(reply.fault),
                    "tokens": len(reply.token_ids),
                    "gap_s": round(reply.gap_s, 3),
                }
            )


async def unplug(scope: UnplugScope, tell: Tell) -> dict[str, Any]:
    """Run it: the report, as one JSON object. WorkerLost when a process cannot be brought back,
    ModelError when the model is not there."""
    began = time.monotonic()
    questions = (
        SimQuestions(scope.seed, scope.sim_decode_scale)
        if scope.engine == "sim"
        else ModelQuestions()
    )
    plan = FleetPlan(
        settings=questions.settings,
        prefill_settings=questions.prefill_settings,
        decode_settings=questions.decode_settings,
        router_settings=questions.router_settings,
        start_s=_LOADS_WITHIN_S,
    )
    tell("starting")
    async with running_fleet(plan) as fleet:
        tell("finding out what is right")
        await questions.learn(fleet)
        async with rpc.aio_channel(fleet.router.endpoint, Timeouts(), Sizes()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            run = Unplug(scope, fleet, questions, stub)
            await run.run(tell)
        left = await left_over(fleet)
        recovery = recovery_of(await fleet.server_info(ROUTER))
    return {
        "benchmark": "unplug",
        "scope": asdict(scope),
        "streams": len(run.gaps_s),
        "broken_streams": run.broken,
        "wrong_tokens": run.wrong,
        "leaked_blocks": left.blocks,
        "leaked_transfers": left.transfers,
        "left_over": list(left.words),
        "gap_p50_s": percentile(run.gaps_s, 0.5),
        "gap_p99_s": percentile(run.gaps_s, 0.99),
        "gap_max_s": max(run.gaps_s),
        "tokens": run.tokens,
        "killed": sum(run.killed.values()),
        "killed_by_name": dict(sorted(run.killed.items())),
        "recovery": recovery.switched_on,
        "recovered_by_retry": recovery.retried,
        "recovered_by_continuation": recovery.continued,
        "told": run.told,
        "settings": {
            "both": dict(questions.settings),
            "prefill": dict(questions.prefill_settings),
            "decode": dict(questions.decode_settings),
            "router": dict(questions.router_settings),
        },
        **made_on(),
        "took_s": time.monotonic() - began,
    }


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What a report says that must not be, in words; empty when all is well."""
    found = [f"{report[name]} {name}" for name in _NONE_OF if report[name]]
    if report["scope"]["engine"] == "sim" and report["gap_p99_s"] >= GAP_MOST_S:
        found.append(f"gap_p99_s {report['gap_p99_s']:.2f} is not under {GAP_MOST_S:g}")
    return found
