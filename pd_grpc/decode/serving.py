"""How long D lately needed for transfers, and for which of those that wait it is too late."""

from __future__ import annotations

from pd_grpc.decode.states import DecodeState
from pd_grpc.decode.transfer import Owner, Transfer
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.serving_times import (
    Budget,
    Served,
    ServingTimes,
    ServingTimesByPeer,
    too_late,
)


class Serving:
    """Learns from every end; see `protocol.serving_times`."""

    def __init__(self, quantile: float) -> None:
        self._by_prefill = ServingTimesByPeer(quantile)

    def times(self, owner: Owner | None) -> ServingTimes:
        """Of the transfers of one P, or of those without a P."""
        return self._by_prefill.of("" if owner is None else owner.name)

    def learn(
        self, transfer: Transfer, state: DecodeState, fault: Fault | None, now: float
    ) -> None:
        """How long one took that has ended says how long others need. What P gives up with time
        left says nothing of D."""
        finished = state is DecodeState.FINISHED
        over = fault is not None and fault.reason is Reason.STAGE_DEADLINE
        if transfer.granted_at is None or not (finished or over):
            return
        until = now if transfer.handed_off_at is None else transfer.handed_off_at
        served = Served(until - transfer.granted_at, now - until, transfer.max_new_tokens)
        if finished:
            self.times(transfer.owner).finished(served, now)
        elif _budget(transfer, now).spent:
            self.times(transfer.owner).ran_out(served, now)

    def too_late(self, transfer: Transfer, now: float) -> Fault | None:
        """Why a transfer whose turn for blocks has come need not have them."""
        budget = _budget(transfer, now)
        if not budget.half_spent:
            return None
        needed_s = self.times(transfer.owner).needed_s(transfer.max_new_tokens, now)
        return too_late(needed_s, budget, transfer.stage)


def _budget(transfer: Transfer, now: float) -> Budget:
    until = transfer.budget_until
    return Budget(until - transfer.created, until - now)
