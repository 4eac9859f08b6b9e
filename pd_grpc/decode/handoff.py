"""The moment a transfer becomes D's: it holds the verified KV and the first token."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode.actions import TokenOut
from pd_grpc.decode.deadlines import TransferTimer
from pd_grpc.decode.ledger import Ledger, hold_as
from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Transfer, Undelivered
from pd_grpc.engine.stopping import Finish
from pd_grpc.protocol.faults import Fault, Reason, stage_deadline
from pd_grpc.v1 import decode_pb2


class HandOff:
    """Brings KV, first token and client together, in whatever order they come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def kv_started(self, transfer: Transfer) -> None:
        """The first stream for a grant is open."""
        if transfer.state is DecodeState.RESERVED:
            self._ledger.move(transfer, DecodeState.RECEIVING)
            hold_as(transfer, BlockState.RECEIVING)

    def kv_completed(self, transfer: Transfer) -> None:
        """Every block of the prompt is verified."""
        ledger = self._ledger
        assert transfer.prefill is not None
        self.kv_started(transfer)
        transfer.kv_complete = True
        transfer.kv_tokens = transfer.prefill.request.prompt_tokens
        ledger.move(transfer, DecodeState.READY)
        hold_as(transfer, BlockState.DECODING)
        ledger.reuse.keep(transfer)
        if transfer.first is None:
            at = ledger.now + ledger.config.first_token_s
            ledger.set_timer(transfer, TransferTimer.FIRST_TOKEN, at)
        if transfer.client is None:
            at = ledger.now + ledger.config.attach_s
            ledger.set_timer(transfer, TransferTimer.ATTACH, at)
        self._try(transfer)

    def first_token(self, transfer: Transfer, first: decode_pb2.FirstToken) -> None:
        """P's first token; a repeated one changes nothing."""
        if transfer.first is not None:
            self._ledger.late()
            return
        transfer.first = first
        self._ledger.cancel_timer(transfer, TransferTimer.FIRST_TOKEN)
        finish = Finish.of_wire(first.finish_reason)
        if finish is not None and transfer.client is None:
            self._finish_unseen(transfer, finish)
        elif not self._show_first(transfer, tell_prefill=False):
            self._try(transfer)

    def attached(self, transfer: Transfer) -> None:
        """The client's leg has come."""
        self._ledger.cancel_timer(transfer, TransferTimer.ATTACH)
        self._ledger.reuse.keep(transfer)
        if transfer.first is None or not self._show_first(transfer, tell_prefill=True):
            self._try(transfer)

    def nobody_came(self, transfer: Transfer) -> None:
        """READY, and no client within the attach time."""
        text = f"no client came for {transfer.key} within {self._ledger.config.attach_s:g} s"
        fault = Fault(Reason.CLIENT_ABSENT, text)
        self._ledger.end(transfer, DecodeState.FAILED, fault)

    def no_first_token(self, transfer: Transfer) -> None:
        """READY, and no first token in time."""
        self._ledger.end(transfer, DecodeState.FAILED, stage_deadline("first_token"))

    def push(
        self,
        transfer: Transfer,
        token: TokenOut,
        finish: Finish | None = None,
        *,
        tell_prefill: bool = True,
    ) -> bool:
        """Count a token of output and show it; True when the answer ends with it. `finish` is
        another's word that it does."""
        assert transfer.client is not None
        transfer.output.append(token.token_id)
        transfer.held.append(token)
        finish = transfer.client.stop.push(token.token_id) or finish
        if finish is None:
            self._ledger.emit(transfer)
            return False
        self._ledger.end(transfer, DecodeState.FINISHED, finish=finish, tell_prefill=tell_prefill)
        return True

    def _show_first(self, transfer: Transfer, *, tell_prefill: bool) -> bool:
        """True when the first token was also the last."""
        first = transfer.first
        if first is None or transfer.client is None or transfer.output:
            return False
        finish = Finish.of_wire(first.finish_reason)
        return self.push(transfer, token_out(first), finish, tell_prefill=tell_prefill)

    def _finish_unseen(self, transfer: Transfer, finish: Finish) -> None:
        assert transfer.first is not None and transfer.prefill is not None
        kept = Undelivered(
            token_out(transfer.first), finish, transfer.prefill.request, transfer.spared_tokens
        )
        # P hears it as the answer to its call.
        self._ledger.end(transfer, DecodeState.FINISHED, tell_prefill=False, undelivered=kept)

    def _try(self, transfer: Transfer) -> None:
        ledger = self._ledger
        if not transfer.kv_complete or transfer.first is None:
            return
        if not transfer.handed_off:
            transfer.handed_off_at = ledger.now
            ledger.leases.end(transfer.grant_id)
        if transfer.client is not None:
            # From here on the client's time alone counts.
            ledger.set_budget(transfer, transfer.client.until)
        if transfer.client is not None and transfer.state is DecodeState.READY:
            ledger.move(transfer, DecodeState.DECODING)
            ledger.scheduler.run(transfer)


def token_out(first: decode_pb2.FirstToken) -> TokenOut:
    """P's first token as a client sees it."""
    return TokenOut(first.token_id, first.logprobs if first.HasField("logprobs") else None)
