"""D's machine without sockets, threads or clocks: events go in one by one, actions are noted.

The engine here is a few lines: it keeps which token's KV is in which place of which block, and the
next token depends on all that is stored, so that a block lost, reused too early or misplaced
changes the answer or is noticed on the spot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from pd_grpc.blocks.pool import BlockPool, BlockState
from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.deadlines import OfTransfer, TransferTimer
from pd_grpc.decode.machine import DecodeMachine, Model
from pd_grpc.decode.sessions import Offer
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer
from pd_grpc.engine.base import Sampled
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2
from tests.blocks.emptying import assert_whole
from tests.decode.messages import (
    BLOCK,
    D_EPOCH,
    EOS,
    LAYOUT,
    MAX_MODEL_LEN,
    SHARD,
    VOCAB,
    Request,
    next_token,
)

if TYPE_CHECKING:
    from tests.decode.prefill_peer import Prefill


class Harness:
    """One D. What it did is noted in the fields below, by the call or stream it concerns.

    `holds_closes` keeps the receiver from stopping to write until `close_receivers`. The engine
    raises over the grants of `raising`, and has no token for those of `tokenless`. What it makes
    of the blocks in `damaged` is no numbers, until something else is written there.
    """

    def __init__(
        self,
        num_blocks: int = 16,
        features: frozenset[str] = frozenset(),
        carriers: Sequence[Carrier] = (INLINE_CARRIER,),
        shards: Sequence[layout_pb2.Shard] = (SHARD,),
        max_model_len: int = MAX_MODEL_LEN,
        **settings: Any,
    ) -> None:
        settings = {"chunk_tokens": 2 * BLOCK, "max_batch": 8, "prefill_batch": 4, **settings}
        self.config = DecodeConfig(
            name="d", engine="sim", block_size=BLOCK, num_blocks=num_blocks, **settings
        )
        self.pool = BlockPool(num_blocks)
        self.now = 1000.0
        self.answers: dict[int, Any] = {}
        self.refused: dict[int, Fault] = {}
        self.shown: dict[int, list[int]] = {}
        self.finished: dict[int, act.FinishGenerate] = {}
        self.told: dict[int, list[decode_pb2.SessionResponse]] = {}
        self.session_ends: dict[int, Fault | None] = {}
        self.opened: dict[str, act.OpenReceive] = {}
        self.closes: dict[str, Fault] = {}
        self.changes: list[act.Changed] = []
        self.ready: tuple[bool, str] | None = None
        self.drains = 0
        self.step: act.StepPlan | None = None
        self.steps: list[act.StepPlan] = []
        self.raising: set[str] = set()
        self.tokenless: set[str] = set()
        self.damaged: set[int] = set()
        self.holds_closes = False
        self._unclosed: list[str] = []
        self._completed: set[str] = set()
        self._stored: dict[tuple[int, int], int] = {}
        self._numbers = count(1)
        minted = count(1)
        offer = Offer(
            instance=types_pb2.Instance(name="d", epoch=D_EPOCH, role=types_pb2.ROLE_DECODE),
            layout=LAYOUT,
            shards=shards,
            features=features,
            max_model_len=max_model_len,
            timeouts=self.config,
            carriers=carriers,
        )
        self.machine = DecodeMachine(
            self.config,
            self.pool,
            offer,
            Model(VOCAB, {EOS}, SimTokenizer(VOCAB), features),
            lambda prefix: f"{prefix}-{next(minted)}",
        )

    # Events

    def feed(self, event: ev.Event) -> None:
        """Let something happen now."""
        self._perform(self.machine.handle(event, self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the machine whenever it asked for it."""
        until = self.now + seconds
        for _ in range(10_000):
            at = self.machine.next_wake()
            if at is None or at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            self._perform(self.machine.tick(self.now))
        raise AssertionError("the machine asks to be woken for ever")

    def advance_alive(self, p: Prefill, seconds: float) -> None:
        """Let time pass while a P without grants heartbeats."""
        until = self.now + seconds
        while self.now < until:
            self.advance(min(self.config.heartbeat_s, until - self.now))
            p.heartbeat()

    def number(self) -> int:
        """A call or stream that was never used before."""
        return next(self._numbers)

    def generate(
        self, request: Request, budget_s: float = 100.0, local: bool = False, **fields: Any
    ) -> int:
        """A client's leg comes."""
        call = self.number()
        self.feed(ev.GenerateCalled(call, request.generate(local, **fields), budget_s))
        return call

    def end_allocate(self, call: int) -> None:
        """The caller of an Allocate no longer waits."""
        self.feed(ev.AllocateCallEnded(call))

    def release(self, message: decode_pb2.ReleaseRequest) -> int:
        """A Release comes; returns the call."""
        call = self.number()
        self.feed(ev.ReleaseCalled(call, message))
        return call

    def leave(self, call: int) -> None:
        """A client's leg goes."""
        self.feed(ev.GenerateCallEnded(call))

    def bring(self, p: Prefill, request: Request, state: DecodeState) -> str:
        """Bring a request from EXPECTED to a state before hand-off; returns the grant, if any."""
        if state is DecodeState.EXPECTED:
            return ""
        call = p.allocate(request)
        if state is DecodeState.WAITING:
            assert self.state(request.transfer_id) is state
            return ""
        grant = str(self.answers[call].grant_id)
        if state in (DecodeState.RECEIVING, DecodeState.READY):
            self.feed(ev.ReceiveStarted(grant))
        if state is DecodeState.READY:
            self.complete(grant, request.tokens)
        assert self.state(request.transfer_id) is state
        return grant

    def run_step(self) -> None:
        """The engine returns from its step."""
        plan = self.step
        assert plan is not None, "no step is running"
        if self.raising & {*plan.prefill_grants, *plan.decode_grants}:
            self.fail_step(Fault(Reason.ENGINE_ERROR, "it raised"))
            return
        prefilled: list[Sampled | None] = []
        for grant_id, chunk in zip(plan.prefill_grants, plan.prefill, strict=True):
            for i, token in enumerate(chunk.token_ids):
                self._store(chunk.block_table, chunk.start + i, token)
            sampled = None
            if chunk.sample is not None:
                sampled = self._sample(grant_id, chunk.block_table, chunk.sample.position)
            prefilled.append(sampled)
        decoded: list[Sampled] = []
        for grant_id, slot in zip(plan.decode_grants, plan.decode, strict=True):
            self._store(slot.block_table, slot.position, slot.token_id)
            assert slot.sample.position == slot.position + 1
            decoded.append(self._sample(grant_id, slot.block_table, slot.position + 1))
        self.step = None
        self.feed(ev.StepDone(plan.step, prefilled, decoded))

    def fail_step(self, fault: Fault) -> None:
        """The engine's step raises."""
        plan, self.step = self.step, None
        assert plan is not None, "no step is running"
        self.feed(ev.StepFailed(plan.step, fault))

    def run(self, limit: int = 1000) -> None:
        """Run the engine until it has nothing to do."""
        for _ in range(limit):
            if self.step is None:
                return
            self.run_step()
        raise AssertionError(f"the engine still has work after {limit} steps")

    def complete_on(self, shard: int, grant_id: str) -> None:
        """One of several shards has all of its KV."""
        self.feed(ev.ReceiveCompleted(grant_id, shard))

    def receive(self, grant_id: str, tokens: Sequence[int]) -> None:
        """All KV of a grant comes in."""
        self.feed(ev.ReceiveStarted(grant_id))
        self.feed(ev.ReceiveProgress(grant_id, 1))
        self.complete(grant_id, tokens)

    def complete(self, grant_id: str, tokens: Sequence[int]) -> None:
        """The last of it is verified. As the receiver, nothing is written twice or after the
        close."""
        opened = self.opened[grant_id]
        end = max((start + count for start, count in opened.wanted), default=0)
        assert len(tokens) <= end * BLOCK or not opened.wanted
        closed = grant_id in self.closes and grant_id not in self._unclosed
        if not closed and grant_id not in self._completed:
            self._completed.add(grant_id)
            for start, count in opened.wanted:
                for position in range(start * BLOCK, min(len(tokens), (start + count) * BLOCK)):
                    self._store(opened.blocks, position, tokens[position])
        self.feed(ev.ReceiveCompleted(grant_id))

    def close_receivers(self) -> None:
        """The receiver has stopped writing wherever it was told to."""
        while self._unclosed:
            grant_id = self._unclosed.pop(0)
            for shard in range(len(self.machine.ledger.sessions.shards)):
                self.feed(ev.ReceiveClosed(grant_id, shard))

    # What came of them

    def transfer(self, transfer_id: str = "t-1", attempt: int = 0) -> Transfer:
        found = self.machine.find(transfer_id, attempt)
        assert found is not None, f"{transfer_id} is not alive"
        return found

    def state(self, transfer_id: str = "t-1", attempt: int = 0) -> DecodeState:
        """Of a live transfer."""
        return self.transfer(transfer_id, attempt).state

    def path(self, transfer_id: str = "t-1", attempt: int = 1) -> list[DecodeState]:
        """The states a transfer went through."""
        key = (transfer_id, attempt)
        return [c.after for c in self.changes if c.key == key]

    def reason(self, call: int) -> Reason:
        """Why a call was refused."""
        return self.refused[call].reason

    def ended_for(self, stream: int) -> list[decode_pb2.TransferEnded]:
        """What a P was told of transfers that have ended."""
        return [m.transfer_ended for m in self.told[stream] if m.HasField("transfer_ended")]

    @property
    def late(self) -> int:
        return self.machine.ledger.late_events

    def check(self) -> None:
        """What holds after every event."""
        self.pool.check()
        self.machine.ledger.cache.check()
        ledger = self.machine.ledger
        for block in self.pool.kept():
            assert self.pool.state_of(block) is not BlockState.QUARANTINED, "it may be found"
        for transfer in ledger.transfers.values():
            grant = transfer.grant_id
            assert not transfer.state.terminal
            ends = (TransferTimer.BUDGET, TransferTimer.ATTACH, TransferTimer.FIRST_TOKEN)
            timers = [ledger.timers.at(OfTransfer(grant, timer)) for timer in ends]
            assert any(timers) or grant in ledger.leases, f"nothing ends {transfer.key}"
            if transfer.state in (DecodeState.DECODING, DecodeState.PREEMPTED):
                assert transfer.client is not None
                assert transfer.kv_complete or transfer.local
        live = Counter(t.state for t in ledger.transfers.values())
        assert {s: n for s, n in ledger.counts.items() if n and not s.terminal} == live
        holdings = {id(h) for h in self.pool.holdings()}
        known = {id(t.holding) for t in ledger.transfers.values() if t.holding is not None}
        quarantined = {id(h) for h in ledger.quarantine.holdings()}
        assert holdings == known | quarantined
        assert not known & quarantined

    def all_returned(self) -> None:
        """Nothing is in flight, and every block is free, or is once what is cached is evicted."""
        self.check()
        assert self.machine.ledger.transfers == {}
        assert self.pool.free == self.pool.total
        assert_whole(self.pool)
        assert self.machine.ledger.calls == {}
        assert len(self.machine.ledger.reservations) == 0
        assert len(self.machine.ledger.timers) == self._session_timers()
        assert self.machine.ledger.leases.next() is None

    def _session_timers(self) -> int:
        return sum(not isinstance(key, OfTransfer) for key in self.machine.ledger.timers._at)

    # Actions

    def _perform(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            self._note(action)
        self.check()
        if not self.holds_closes:
            self.close_receivers()

    def _note(self, action: act.Action) -> None:
        match action:
            case act.Answer(call, message):
                self._settle(call)
                self.answers[call] = message
            case act.Refuse(call, fault):
                self._settle(call)
                self.refused[call] = fault
            case act.SessionSend(stream, message):
                assert stream not in self.session_ends
                self.told.setdefault(stream, []).append(message)
            case act.SessionEnd(stream, fault):
                assert stream not in self.session_ends
                self.session_ends[stream] = fault
            case act.Emit(call, tokens):
                assert tokens and call not in self.finished and call not in self.refused
                self.shown.setdefault(call, []).extend(t.token_id for t in tokens)
            case act.FinishGenerate(call):
                self._settle(call)
                self.finished[call] = action
            case act.OpenReceive(grant_id):
                self.opened[grant_id] = action
            case act.CloseReceive(grant_id, fault):
                assert grant_id not in self.closes
                self.closes[grant_id] = fault
                self._unclosed.append(grant_id)
            case act.RunStep(plan):
                assert self.step is None
                self.step = plan
                self.steps.append(plan)
            case act.Changed():
                self.changes.append(action)
            case act.SetReady(ready, why):
                self.ready = (ready, why)
            case act.Drained():
                self.drains += 1

    def _settle(self, call: int) -> None:
        settled = (*self.answers, *self.refused, *self.finished)
        assert call not in settled, f"call {call} was answered twice"

    # The engine's memory

    def _store(self, table: Sequence[int], position: int, token: int) -> None:
        if position % BLOCK == 0:
            self.damaged.discard(table[position // BLOCK])
        self._stored[table[position // BLOCK], position % BLOCK] = token

    def _sample(self, grant_id: str, table: Sequence[int], tokens: int) -> Sampled:
        if grant_id in self.tokenless:
            return Sampled(-1, fault="no token is left")
        if self.damaged.intersection(table[: -(-tokens // BLOCK)]):
            return Sampled(-1, fault="logits are not finite numbers", not_finite=True)
        stored = [self._stored[table[i // BLOCK], i % BLOCK] for i in range(tokens)]
        return Sampled(next_token(stored))
