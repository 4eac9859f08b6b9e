"""D's rules toward clients: the leg of a hand-over, and requests that D prefills itself."""

from __future__ import annotations

from collections.abc import Collection

from pd_grpc.decode.actions import Emit, FinishGenerate, Refuse
from pd_grpc.decode.checks import (
    Limits,
    check_generate,
    check_handoff,
    draining,
    legs_differ,
    unlike,
)
from pd_grpc.decode.events import GenerateCalled, GenerateCallEnded
from pd_grpc.decode.handoff import HandOff
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.reservations import queue_full
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import ClientLeg, Ended, Transfer, usage_of
from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.stopping import StopRule
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey, key_of
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2


class ClientDesk:
    """Answers clients."""

    def __init__(
        self,
        ledger: Ledger,
        handoff: HandOff,
        limits: Limits,
        eos_token_ids: Collection[int],
        tokenizer: Tokenizer,
    ) -> None:
        self._ledger = ledger
        self._handoff = handoff
        self._limits = limits
        self._eos = eos_token_ids
        self._tokenizer = tokenizer
        self._local_requests: dict[str, str] = {}

    def generate(self, event: GenerateCalled) -> None:
        """Attach to a hand-over, or begin a request of our own."""
        try:
            sampling = check_generate(event.request, self._limits)
            if event.objection is not None:
                raise event.objection
            if event.request.HasField("handoff"):
                check_handoff(event.request, self._limits.instance)
                self._attach(event, sampling)
            else:
                self._begin(event, sampling)
        except Fault as fault:
            self._ledger.act(Refuse(event.call, fault.for_client()))

    def call_ended(self, event: GenerateCallEnded) -> None:
        """The client has left: before hand-off the transfer ends for P too."""
        transfer = self._ledger.of_call(event.call)
        self._ledger.calls.pop(event.call, None)
        if transfer is None:
            return
        transfer.client = None
        fault = Fault(Reason.CLIENT_GONE, f"the client of {transfer.key} has left")
        self._ledger.end(transfer, DecodeState.RELEASED, fault)

    def drain(self) -> None:
        """Those whose Allocate has not come, and would be refused now, do better elsewhere."""
        for transfer in list(self._ledger.transfers.values()):
            if transfer.state is DecodeState.EXPECTED:
                self._ledger.drop(transfer, draining())

    def granted(self, transfer: Transfer) -> None:
        """A request of our own has its blocks: prefill it."""
        if transfer.local:
            self._handoff.kv_started(transfer)
            self._ledger.scheduler.prefill(transfer)

    def _attach(self, event: GenerateCalled, sampling: Sampling) -> None:
        ledger = self._ledger
        key = key_of(event.request.handoff.ref)
        ended = ledger.tombstones.get(key, ledger.now)
        client = self._leg(event, sampling)
        if ended is not None:
            self._too_late(event.call, key, ended, client)
            return
        transfer = ledger.of_key(key)
        if transfer is not None and transfer.client is not None:
            raise Fault(Reason.DUPLICATE_TRANSFER, f"{key} has a client already")
        if transfer is None:
            closed = ledger.closed()
            if closed is not None:
                raise closed
            self._check_room(client)
            transfer = ledger.create(key, DecodeState.EXPECTED, event.budget_s)
        transfer.client = client
        transfer.request_id = event.request.request_id or transfer.request_id
        ledger.calls[event.call] = transfer.grant_id
        ledger.narrow_budget(transfer, event.budget_s)
        differ = legs_differ(transfer)
        if differ is not None:
            ledger.end(transfer, DecodeState.FAILED, differ)
            return
        self._handoff.attached(transfer)

    def _check_room(self, client: ClientLeg) -> None:
        """Legs cost no blocks, but their prompts are kept."""
        ledger = self._ledger
        limit = ledger.config.client_legs
        if ledger.counts[DecodeState.EXPECTED] >= limit:
            needed = self._limits.blocks_for(len(client.prompt) + len(client.generated) + 1)
            raise queue_full(f"{limit} clients wait for their prefill", needed, ledger.pool.free)

    def _too_late(self, call: int, key: TransferKey, ended: Ended, client: ClientLeg) -> None:
        """The transfer ended before its client came: it hears how, or gets the kept answer."""
        kept = ended.undelivered
        if kept is None:
            raise ended.fault or Fault(Reason.RELEASED, f"{key} has ended")
        differ = unlike(kept.allocate, client)
        if differ is not None:
            raise differ
        client.stop.push(kept.token.token_id)
        self._ledger.act(Emit(call, (kept.token,)))
        usage = usage_of(client.prompt, client.stop.generated, kept.spared_tokens)
        self._ledger.act(FinishGenerate(call, kept.finish, usage))

    def _begin(self, event: GenerateCalled, sampling: Sampling) -> None:
        ledger, request = self._ledger, event.request
        closed = ledger.closed()
        if closed is not None:
            raise closed
        known = self._local_requests.get(request.request_id)
        if request.request_id and known in ledger.transfers:
            text = f"request {request.request_id} is in flight"
            raise Fault(Reason.DUPLICATE_REQUEST, text)
        key = TransferKey(ledger.mint("local"), 1)
        transfer = ledger.create(key, DecodeState.EXPECTED, event.budget_s)
        transfer.local = True
        transfer.client = self._leg(event, sampling)
        transfer.request_id = request.request_id
        self._remember(request, transfer)
        ledger.calls[event.call] = transfer.grant_id
        needed = self._limits.blocks_for(len(transfer.tokens) + 1)
        try:
            reserved = ledger.reservations.request(
                transfer.grant_id,
                needed,
                ledger.reuse.names(transfer, len(transfer.tokens) - 1),
                ledger.scheduler.holds_back,
            )
        except Fault as fault:
            ledger.end(transfer, DecodeState.FAILED, fault)
            return
        if reserved is None:
            ledger.move(transfer, DecodeState.WAITING)
            return
        ledger.grant(transfer, reserved)
        self.granted(transfer)

    def _remember(self, request: inference_pb2.GenerateRequest, transfer: Transfer) -> None:
        live = self._ledger.transfers
        if len(self._local_requests) > 2 * len(live) + 64:
            kept = {r: g for r, g in self._local_requests.items() if g in live}
            self._local_requests = kept
        if request.request_id:
            self._local_requests[request.request_id] = transfer.grant_id

    def _leg(self, event: GenerateCalled, sampling: Sampling) -> ClientLeg:
        request = event.request
        generated = list(request.generated_token_ids)
        stop = StopRule(sampling, self._eos, self._tokenizer, generated)
        return ClientLeg(
            event.call,
            list(request.token_ids.ids),
            generated,
            sampling,
            stop,
            self._ledger.now + event.budget_s,
            BlockChain(self._limits.block_size, request.scope.cache_salt),
        )
