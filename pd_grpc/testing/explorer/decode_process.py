"""A D of the world: the real machine and receiver, an engine that reads tags, and their shell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.carrier import INLINE_CARRIER
from pd_grpc.decode.deadlines import OfTransfer
from pd_grpc.decode.machine import DecodeMachine, Model
from pd_grpc.decode.sessions import Offer
from pd_grpc.decode.states import TRANSITIONS, DecodeState
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration, seconds
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import Place
from pd_grpc.testing.explorer.decode_rules import broken_rules
from pd_grpc.testing.explorer.kv import (
    EOS,
    MAX_MODEL_LEN,
    TOKENIZER,
    UNCUT,
    VOCAB,
    Cut,
)
from pd_grpc.testing.explorer.lending import CARRIERS, writable
from pd_grpc.testing.explorer.process import FIRST_SHARD, Input, Looks
from pd_grpc.testing.explorer.stepping import SteppingProcess
from pd_grpc.testing.explorer.wire import CANCEL, CLOSE, LEND, Interned, Message
from pd_grpc.v1 import admin_pb2, decode_pb2, inference_pb2, layout_pb2, types_pb2

_OF_PREFILL = frozenset({Reason.PREFILL_LOST, Reason.LEASE_EXPIRED})
_GRANTED = frozenset(
    {
        DecodeState.RESERVED,
        DecodeState.RECEIVING,
        DecodeState.READY,
        DecodeState.DECODING,
        DecodeState.PREEMPTED,
    }
)


class DecodeProcess(SteppingProcess):
    """One D."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: DecodeConfig,
        fine: bool,
        lends: bool = False,
        cut: Cut = UNCUT,
    ) -> None:
        super().__init__(name, epoch, ids, config, fine, lends, cut)
        self.minted: Counter[str] = Counter()
        self.subject = ""
        instance = types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_DECODE)
        offer = Offer(
            instance=instance,
            layout=cut.layout,
            shards=[_shard(name, i, place) for i, place in enumerate(cut.places)],
            features=frozenset(),
            max_model_len=MAX_MODEL_LEN,
            timeouts=config,
            carriers=CARRIERS if lends else (INLINE_CARRIER,),
        )
        model = Model(VOCAB, frozenset({EOS}), TOKENIZER, frozenset())
        self.machine = DecodeMachine(config, self.pool, offer, model, self._mint)
        self.unary: set[int] = set()
        self.clients: set[int] = set()
        self.sessions: set[int] = set()
        self.handed_off: frozenset[TransferKey] = frozenset()

    def _mint(self, prefix: str) -> str:
        """An id made of whom it is for, so that it does not tell in which order others came."""
        name = f"{prefix}-{self.subject}"
        self.minted[name] += 1
        return f"{name}-{self.minted[name]}"

    # --- what others see -------------------------------------------------------------------------

    def looks(self) -> Looks:
        """See `Process.looks`."""
        ledger, lending = self.machine.ledger, self.lending
        steps = []
        wake = self.machine.next_wake()
        bulk_wakes = [receiver.next_wake() for receiver in self.receivers]
        if wake is not None and wake <= self.now:
            steps.append("tick")
        if any(at is not None and at <= self.now for at in bulk_wakes):
            steps.append("expire")
        if self.plan is not None:
            steps.append("step")
        steps += self._posted() + ["goodbye"] * self.drained
        quarantined = len(ledger.quarantine) > 0 and not self._kept_for_good()
        settled = not (steps or ledger.transfers or quarantined or self.streams)
        facts = tuple(
            (
                t.key,
                t.state.name,
                None if t.owner is None else (t.owner.name, t.owner.epoch),
                None if t.client is None else t.client.call,
                t.handed_off,
                t.local,
            )
            for t in ledger.transfers.values()
        )
        calls = frozenset(self.clients | self.unary)
        known = (self.epoch, facts, calls)
        wake_s = self._wake_s(wake, *bulk_wakes)
        return Looks(
            tuple(steps),
            wake_s,
            settled,
            known,
            self.kept is None,
            writable=self.writable() if self.lends else frozenset(),
            quarantined=len(ledger.quarantine) > 0,
            rows=self._rows(),
            awaited=frozenset() if lending is None else lending.awaited(ledger.quarantine),
        )

    def _serves(self) -> bool:
        return self.machine.ledger.closed() is None

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        ledger = self.machine.ledger
        found = [f"{t.key} is {t.state.name}" for t in ledger.transfers.values()]
        if self.pool.free != self.pool.total - self._kept_for_good():
            found.append(f"blocks {self.pool.holdings()}")
        if ledger.calls or self.clients or self.unary:
            found.append(f"calls {ledger.calls}, {self.clients}, {self.unary}")
        if len(ledger.reservations) or ledger.leases.next() is not None:
            found.append("a reservation or a lease")
        if any(isinstance(key, OfTransfer) for key in ledger.timers._at):
            found.append("a transfer's timer")
        if any(receiver._grants for receiver in self.receivers):
            found.append("a grant is open on a shard")
        if ledger.scheduler.has_work:
            found.append("work for the engine")
        return [f"{self.name}: {each}" for each in found]

    # --- what happens ----------------------------------------------------------------------------

    def _happen(self, happens: Input) -> None:
        kind = happens[0]
        if kind == "up" and self._asked_by_router(happens[1], self._ids.messages[happens[2]]):
            return
        if kind == "up":
            call = happens[1]
            self._heard(call, self._ids.calls[call].kind, self._ids.messages[happens[2]])
        elif kind == "write":
            self._written_to(self._ids.messages[happens[1]].body)
        elif kind == "tick":
            self.subject = "tick"
            self._perform(self.machine.tick(self.now))
        elif kind == "expire":
            self._expire()
        elif kind in ("step", "spoil"):
            self._step(*happens[1:])
        elif kind == "poison":
            self.poisoned.add(happens[1])
            self._step()
        elif kind == "drain":
            self.kept = frozenset(t.key for t in self.machine.ledger.transfers.values())
            self._feed(ev.DrainRequested(self.config.drain_s))
        elif kind == "goodbye":
            self.drained, self.left = False, True
            self._feed(ev.Leaving())
        elif kind == "fail":
            self._raise()
        else:
            self._take_posted(kind)

    def _heard(self, call: int, kind: str, message: Message) -> None:
        if kind == "session":
            self._session(call, message)
        elif kind == "transfer":
            self._transfer(call, message)
        elif kind == LEND:
            self._lend(call, message)
        elif kind == "generate":
            self._generate(call, message)
        elif message.kind == CANCEL:
            if call in self.unary:
                self.unary.discard(call)
                if kind == "allocate":
                    self._feed(ev.AllocateCallEnded(call))
        elif kind == "allocate":
            request, timeout_s = message.body
            self.unary.add(call)
            asked = decode_pb2.AllocateRequest()
            asked.CopyFrom(request)
            wait_s = min(seconds(request.max_wait), timeout_s - self.config.hop_margin_s)
            asked.max_wait.CopyFrom(duration(wait_s))
            self._about(request.ref)
            self._feed(ev.AllocateCalled(call, asked))
        elif kind == "first":
            self.unary.add(call)
            self._about(message.body.ref)
            self._feed(ev.FirstTokenCalled(call, message.body))
        elif kind == "release":
            self.unary.add(call)
            self._about(message.body.ref)
            self._feed(ev.ReleaseCalled(call, message.body))
        else:
            self._ask(call, message.body)

    def _session(self, call: int, message: Message) -> None:
        if message.kind == "hello":
            self.sessions.add(call)
            instance = message.body.instance
            self.subject = f"{instance.name}.{instance.epoch}"
            self._feed(ev.HelloReceived(call, message.body))
        elif message.kind in (CANCEL, CLOSE):
            self.sessions.discard(call)
            self._feed(ev.SessionStreamEnded(call))
        elif call in self.sessions:
            said = message.body
            if said.WhichOneof("message") == "goodbye":
                # The bulk side told us what P knows before it told P, who says goodbye after that.
                self._catch_up()
                self._feed(ev.GoodbyeReceived(call))
            else:
                self._feed(ev.HeartbeatReceived(call, said.heartbeat))

    def _generate(self, call: int, message: Message) -> None:
        if message.kind == CANCEL:
            self.clients.discard(call)
            self._feed(ev.GenerateCallEnded(call))
            return
        request, budget_s = message.body
        self.clients.add(call)
        if request.HasField("handoff"):
            self._about(request.handoff.ref)
        else:
            self.subject = request.request_id
        left_s = max(0.0, budget_s - self.config.hop_margin_s)
        self._feed(ev.GenerateCalled(call, request, left_s))

    def _ask(self, call: int, request: admin_pb2.GetTransferRequest) -> None:
        """What AdminService answers."""
        key = TransferKey(request.transfer_id, request.attempt)
        live = self.machine.ledger.of_key(key)
        ended = self.machine.ledger.tombstones.get(key, self.now)
        if live is None and ended is None:
            self._end(call, Fault(Reason.UNKNOWN_TRANSFER, f"{key} is unknown here"))
            return
        state = live.state if live is not None else ended.state if ended is not None else None
        assert state is not None
        info = admin_pb2.TransferInfo(state=state.wire)
        self._down(call, "answer", admin_pb2.GetTransferResponse(transfer=info))

    def _about(self, ref: types_pb2.TransferRef) -> None:
        self.subject = f"{ref.transfer_id}#{ref.attempt}"

    # --- what it does ----------------------------------------------------------------------------

    def _feed(self, event: ev.Event) -> None:
        self._perform(self.machine.handle(event, self.now))

    def _perform(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Answer(call, message):
                    self._settle(call, message)
                case act.Refuse(call, fault):
                    if call in self.clients:
                        self._end_client(call, fault)
                    elif call in self.unary:
                        self.unary.remove(call)
                        self._end(call, fault)
                case act.SessionSend(stream, message):
                    if stream in self.sessions:
                        self._tell(stream, message)
                case act.SessionEnd(stream, fault):
                    if stream in self.sessions:
                        self.sessions.remove(stream)
                        self._end(stream, fault)
                        self.news.append(ev.SessionStreamEnded(stream))
                case act.Emit(call, tokens):
                    if call in self.clients:
                        ids = [token.token_id for token in tokens]
                        said = inference_pb2.GenerateResponse(token_ids=ids)
                        self._down(call, "tokens", said)
                case act.FinishGenerate(call, reason, usage):
                    if call in self.clients:
                        last = inference_pb2.GenerateResponse(
                            finish_reason=reason.wire, usage=usage
                        )
                        self._down(call, "tokens", last)
                        self._end_client(call, None)
                case act.RunStep(plan):
                    self._take_plan(plan)
                case act.Changed():
                    self._note(action)
                case act.SetReady():
                    pass
                case act.Drained():
                    self.drained = True
                case act.AdmitSession() | act.DismissPrefill():
                    # The shard's loop has heard it before P can have read the welcome.
                    self._all_shards(action)
                case _:
                    self._post_to_shards(action)

    def _settle(self, call: int, message: act.UnaryAnswer) -> None:
        if call in self.unary:
            self.unary.remove(call)
            self._down(call, "answer", message)

    def _end_client(self, call: int, fault: Fault | None) -> None:
        self.clients.remove(call)
        self._end(call, fault)
        self.news.append(ev.GenerateCallEnded(call))

    def _tell(self, stream: int, message: decode_pb2.SessionResponse) -> None:
        if message.WhichOneof("message") == "heartbeat_ack":
            unknown = message.heartbeat_ack.unknown_grant_ids
            for grant_id in self.machine.ledger.transfers.keys() & set(unknown):
                self._wrong("a grant that is held is known", grant_id)
            ack = decode_pb2.HeartbeatAck(unknown_grant_ids=unknown)
            message = decode_pb2.SessionResponse(heartbeat_ack=ack)
        self._down(stream, "session", message)

    def _note(self, change: act.Changed) -> None:
        before, after = change.before, change.after
        if before in _GRANTED and change.fault and change.fault.reason is Reason.DRAINING:
            self._wrong("a drain finishes what runs", f"{change.key} ended in {before.name}")
        lost = change.fault is not None and change.fault.reason in _OF_PREFILL
        if lost and change.key in self.handed_off:
            self._wrong("after the hand-off it is D's", f"{change.key}: {change.fault}")
        dropped = change.fault is None and after.terminal
        if before is not None and not dropped and after not in TRANSITIONS[before]:
            self._wrong(
                "terminal states absorb", f"{change.key} went from {before.name} to {after.name}"
            )

    # --- what must hold --------------------------------------------------------------------------

    def _check(self) -> None:
        self.pool.check()
        self.machine.ledger.cache.check()
        ledger = self.machine.ledger
        self._check_drain(t.key for t in ledger.transfers.values())
        for invariant, text in broken_rules(ledger, self.receivers):
            self._wrong(invariant, text)
        self._check_turns()
        self.handed_off = frozenset(t.key for t in ledger.transfers.values() if t.handed_off)

    def writable(self) -> frozenset[tuple[str, int]] | None:
        """See `ReceivingProcess.writable`."""
        return None if self.left else writable(self.machine.ledger)

    def _kept_for_good(self) -> int:
        lending = self.lending
        return 0 if lending is None else lending.kept_for_good(self.machine.ledger.quarantine)


def _shard(name: str, shard: int, place: Place) -> layout_pb2.Shard:
    told = place.to_proto()
    told.endpoint = f"{name}:{FIRST_SHARD + shard}"
    return told
