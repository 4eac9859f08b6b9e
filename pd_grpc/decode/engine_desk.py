"""D's rules toward its engine: one step at a time, and what becomes of its tokens."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode.actions import RunStep, SetReady, StepPlan, TokenOut
from pd_grpc.decode.deadlines import OfServer
from pd_grpc.decode.events import StepDone, StepFailed
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger, hold_as
from pd_grpc.decode.quarantine import ENGINE
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.engine.base import PrefillChunk, Sampled
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import types_pb2


class EngineDesk:
    """Plans the next step when the last has returned."""

    def __init__(self, ledger: Ledger, handoff: HandOff) -> None:
        self._ledger = ledger
        self._handoff = handoff
        self._plan: StepPlan | None = None
        self._steps = 0

    @property
    def idle(self) -> bool:
        """Whether no step is running."""
        return self._plan is None

    def schedule(self) -> None:
        """Start a step if none runs and there is something to run."""
        ledger = self._ledger
        if self._plan is not None or not ledger.scheduler.has_work:
            return
        plan = ledger.scheduler.plan(self._steps + 1)
        if plan is None:
            return
        self._steps += 1
        self._plan = plan
        for grant_id in plan.prefill_grants:
            transfer = ledger.transfers[grant_id]
            if transfer.computed_from is None and not transfer.handed_off:
                transfer.computed_from = ledger.now
        ledger.in_step = frozenset(plan.prefill_grants + plan.decode_grants)
        ledger.timers.set(OfServer.STEP, ledger.now + ledger.config.no_progress_s)
        ledger.act(RunStep(plan))

    def done(self, event: StepDone) -> None:
        """Count the tokens in; those whose transfer has ended are dropped."""
        plan = self._finish_step(event.step)
        if plan is None:
            return
        self._distrust(plan, event)
        transfers = self._ledger.transfers
        chunks = zip(plan.prefill_grants, plan.prefill, event.prefilled, strict=True)
        for grant_id, chunk, sampled in chunks:
            if grant_id in transfers:
                self._prefilled(transfers[grant_id], chunk, sampled)
        for grant_id, sampled in zip(plan.decode_grants, event.decoded, strict=True):
            if grant_id in transfers:
                self._decoded(transfers[grant_id], sampled)

    def failed(self, event: StepFailed) -> None:
        """A step that raised fails the request that was alone in it. Several are tried apart, so
        that only those at fault fail."""
        plan = self._finish_step(event.step)
        if plan is None:
            return
        ledger, grant_ids = self._ledger, plan.prefill_grants + plan.decode_grants
        alive = [grant_id for grant_id in grant_ids if grant_id in ledger.transfers]
        if len(grant_ids) > 1:
            ledger.scheduler.suspect(alive)
            return
        for grant_id in alive:
            ledger.end(ledger.transfers[grant_id], DecodeState.FAILED, event.fault)

    def stuck(self) -> None:
        """The step has not returned: say so, and fail what waits for the engine."""
        ledger = self._ledger
        if ledger.stuck is None:
            text = f"the engine made no progress for {ledger.config.no_progress_s:g} s"
            ledger.stuck = Fault(Reason.ENGINE_STUCK, text)
            ledger.act(SetReady(False, text))
        for transfer in list(ledger.transfers.values()):
            if transfer.handed_off or transfer.local:
                ledger.end(transfer, DecodeState.FAILED, ledger.stuck)
        # What is handed over from now on waits as long.
        ledger.timers.set(OfServer.STEP, ledger.now + ledger.config.no_progress_s)

    def _finish_step(self, step: int) -> StepPlan | None:
        ledger, plan = self._ledger, self._plan
        if plan is None or plan.step != step:
            ledger.late()
            return None
        self._plan = None
        ledger.in_step = frozenset()
        ledger.timers.cancel(OfServer.STEP)
        for grant_id in plan.prefill_grants + plan.decode_grants:
            ledger.stopped_writing(grant_id, ENGINE)
        if ledger.stuck is not None:
            ledger.stuck = None
            if not ledger.draining:
                ledger.act(SetReady(True, ""))
        return plan

    def _distrust(self, plan: StepPlan, event: StepDone) -> None:
        """KV of which no numbers came may be wrong, wherever it is from and whether or not its
        request is still here: the next one that asks for it gets it anew."""
        given = (*event.prefilled, *event.decoded)
        for table, sampled in zip(plan.block_tables, given, strict=True):
            if sampled is not None and sampled.not_finite:
                self._ledger.cache.distrust(table)

    def _prefilled(self, transfer: Transfer, chunk: PrefillChunk, sampled: Sampled | None) -> None:
        ledger = self._ledger
        if sampled is not None and self._failed(transfer, sampled):
            return
        transfer.kv_tokens = chunk.start + len(chunk.token_ids)
        ledger.reuse.keep(transfer)
        if transfer.handed_off:
            if transfer.kv_tokens == len(transfer.tokens) - 1:
                ledger.scheduler.drop(transfer)
                ledger.move(transfer, DecodeState.DECODING)
                ledger.scheduler.run(transfer)
            return
        if sampled is None:
            return
        ledger.scheduler.drop(transfer)
        transfer.kv_complete = True
        transfer.handed_off_at = ledger.now
        if transfer.state is DecodeState.RECEIVING:
            ledger.move(transfer, DecodeState.READY)
        hold_as(transfer, BlockState.DECODING)
        ledger.move(transfer, DecodeState.DECODING)
        if not self._handoff.push(transfer, _shown(sampled), _end_with(sampled)):
            ledger.scheduler.run(transfer)

    def _decoded(self, transfer: Transfer, sampled: Sampled) -> None:
        if self._failed(transfer, sampled):
            return
        transfer.kv_tokens += 1
        self._ledger.reuse.keep(transfer)
        self._handoff.push(transfer, _shown(sampled), _end_with(sampled))

    def _failed(self, transfer: Transfer, sampled: Sampled) -> bool:
        """Whether there was no token for a request, which then ends; the KV of this step, which may
        be what is wrong, is not kept."""
        if sampled.fault:
            fault = Fault(Reason.ENGINE_ERROR, sampled.fault)
            self._ledger.end(transfer, DecodeState.FAILED, fault)
        return bool(sampled.fault)


def _end_with(sampled: Sampled) -> Finish | None:
    return Finish.STOP if sampled.last else None


def _shown(sampled: Sampled) -> TokenOut:
    if sampled.logprob is None:
        return TokenOut(sampled.token_id)
    chosen = types_pb2.TokenLogprob(token_id=sampled.token_id, logprob=sampled.logprob)
    top = [types_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in sampled.top]
    return TokenOut(sampled.token_id, types_pb2.PositionLogprobs(chosen=chosen, top=top))
