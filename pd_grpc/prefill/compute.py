"""From a grant to the first token: steps of the engine, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from pd_grpc.blocks.pool import BlockState
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.engine.base import Sampled
from pd_grpc.engine.chunks import cut_of
from pd_grpc.prefill.actions import EngineAlive, EngineStuck, RunStep
from pd_grpc.prefill.conversations import Fail
from pd_grpc.prefill.requests import Requests, Timer
from pd_grpc.prefill.scheduler import Plan, PrefillScheduler
from pd_grpc.prefill.states import PrefillRecord, PrefillState
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.serving_times import Budget, Served, ServingTimesByPeer, too_late
from pd_grpc.v1 import prefill_pb2

_STUCK = Timer("engine")


class Compute:
    """Feeds the engine with chunks of the requests that are prepared."""

    def __init__(
        self,
        requests: Requests,
        config: PrefillConfig,
        cache: PrefixCache,
        layout: KvLayout,
        fail: Fail,
        decoding_s: Callable[[PrefillRecord], float],
        starting: Callable[[PrefillRecord, float], None],
        computed: Callable[[PrefillRecord, Sampled, float], None],
    ) -> None:
        """`decoding_s` says how long D needs after P. `starting` hears of a request that has its
        blocks, before its first step; `computed` takes it over with its first token."""
        self.stuck: Fault | None = None
        """Set while a step lasts longer than `no_progress_s`."""
        self.paused = False
        """While set no further request is begun; those begun are computed to the end."""
        self._requests = requests
        self._config = config
        self._fail = fail
        self._decoding_s = decoding_s
        self._starting = starting
        self._computed = computed
        self._scheduler = PrefillScheduler(
            cache, layout, config.prefill_batch, config.chunk_tokens, cut_of(config)
        )
        self._serving = ServingTimesByPeer(config.serving_quantile)
        self._steps = count(1)
        self._step = 0
        self._plan: Plan | None = None

    def ready(self, record: PrefillRecord) -> None:
        """A request is prepared."""
        self._scheduler.add(record)

    def forget(self, record: PrefillRecord) -> None:
        """A request has ended. Its part of the step that runs is computed to the end."""
        self._scheduler.remove(record)

    def learn(
        self, record: PrefillRecord, state: PrefillState, fault: Fault | None, now: float
    ) -> None:
        """How long one took that has ended says how long others need."""
        if record.times.compute is None:
            return
        times = self._serving.of(record.target.endpoint)
        served = Served(0.0, now - record.times.compute, len(record.tokens))
        over = fault is not None and fault.reason is Reason.STAGE_DEADLINE
        if state is PrefillState.HANDED_OFF:
            times.finished(served, now)
        elif over and _budget(record, now).spent:
            times.ran_out(served, now)

    def pump(self, now: float) -> bool:
        """Start the next step if the engine is free; whether there was anything to do."""
        if self._plan is not None:
            return False
        refused = self._refuse_late(now)
        plan = self._scheduler.plan(admit=not self.paused)
        if plan is None:
            return refused
        for record in plan.admitted:
            record.times.compute = now
            self._requests.move(record, PrefillState.COMPUTING, now)
            self._starting(record, now)
        for record in plan.records:
            record.in_step = True
        self._plan = plan
        self._step = next(self._steps)
        self._requests.timers.set(_STUCK, now + self._config.no_progress_s)
        keys = tuple(record.key for record in plan.records)
        self._requests.do(RunStep(self._step, keys, plan.chunks))
        return True

    def done(self, step: int, results: Sequence[Sampled | None], now: float) -> None:
        """The step has been computed. One that got no token fails alone, and what was computed for
        it is not kept; where no numbers came of its KV, nothing of that is found any more."""
        plan = self._finish(step)
        if plan is None:
            return
        for chunk, sampled in zip(plan.chunks, results, strict=True):
            if sampled is not None and sampled.not_finite:
                self._scheduler.distrust(chunk.block_table)
        for record, chunk, sampled in zip(plan.records, plan.chunks, results, strict=True):
            if record.state.terminal:
                self._requests.return_blocks(record)
                continue
            if sampled is not None and sampled.fault:
                self._fail(record, Fault(Reason.ENGINE_ERROR, sampled.fault), now, True)
                continue
            record.computed = chunk.start + len(chunk.token_ids)
            self._scheduler.keep(record)
            progress = prefill_pb2.Progress(computed_tokens=record.computed)
            self._requests.emit(record, prefill_pb2.PrefillResponse(progress=progress))
            if sampled is not None:
                self._scheduler.remove(record)
                assert record.holding is not None
                record.holding.move(BlockState.SENDING)
                self._computed(record, sampled, now)

    def failed(self, step: int, message: str, now: float) -> None:
        """The engine could not run the step. A request that failed in company is tried alone."""
        plan = self._finish(step)
        if plan is None:
            return
        alive = tuple(record for record in plan.records if not record.state.terminal)
        for record in plan.records:
            if record.state.terminal:
                self._requests.return_blocks(record)
        if len(plan.records) > 1:
            self._scheduler.suspect(alive)
            return
        for record in alive:
            self._fail(record, Fault(Reason.ENGINE_ERROR, message), now, True)

    def stick(self, now: float) -> None:
        """The step lasts too long: fail what needs the engine, and take nothing until it ends."""
        limit = f"{self._config.no_progress_s:g} s"
        fault = Fault(Reason.ENGINE_STUCK, f"the engine has not finished a step within {limit}")
        self.stuck = fault
        self._requests.do(EngineStuck(fault))
        for record in list(self._requests.in_flight.values()):
            if record.state is not PrefillState.SENDING:
                self._fail(record, fault, now, True)

    def _refuse_late(self, now: float) -> bool:
        """Refuse those that wait for the engine and would be nobody's when they are done; whether
        there were any."""
        waiting = self._scheduler.waiting()
        refused = False
        for record in waiting:
            budget = _budget(record, now)
            if not budget.half_spent:
                continue
            times = self._serving.of(record.target.endpoint)
            needed_s = times.needed_s(len(record.tokens), now)
            if needed_s is not None:
                needed_s += self._decoding_s(record)
            late = too_late(needed_s, budget, "queue")
            if late is not None:
                self._fail(record, late, now, True)
                refused = True
        return refused

    def _finish(self, step: int) -> Plan | None:
        if self._plan is None or step != self._step:
            self._requests.late_events += 1
            return None
        plan, self._plan = self._plan, None
        for record in plan.records:
            record.in_step = False
        self._requests.timers.cancel(_STUCK)
        if self.stuck is not None:
            self.stuck = None
            self._requests.do(EngineAlive())
        return plan


def _budget(record: PrefillRecord, now: float) -> Budget:
    return Budget(record.deadline - record.times.called, record.left(now))
