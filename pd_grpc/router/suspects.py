"""Who is to blame for a failure, and who is left to try instead.

A fault says what happened, and on which leg it was told. That is not always who is at fault: P
hears of D's failures and D of P's, and each tells them on its own leg. Where it cannot be known,
both are suspects, and another pair is one in which at least one of them is replaced, both if that
can be.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.protocol.faults import Code, Fault, Reason, Retry
from pd_grpc.router.machine import LEG, STATUS, Leg, PrefillLeg, RoutedRequest
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair

Blame = frozenset[Leg]

NOBODY: Blame = frozenset()
EITHER: Blame = frozenset(Leg)

_OF_PREFILL = frozenset({Reason.PREFILL_LOST, Reason.SENDER_STUCK})
_OF_DECODE = frozenset({Reason.DECODE_LOST, Reason.NO_BLOCKS})


def blamed(fault: Fault, request: RoutedRequest) -> Blame:
    """The legs one of which another try must take elsewhere: one for certain, or either. NOBODY
    where no other try helps: the status table says never, the fault is of no leg, or it is a bare
    status other than UNAVAILABLE."""
    if LEG not in fault.metadata or fault.retry is not Retry.OTHER:
        return NOBODY
    if fault.metadata.get(STATUS, Code.UNAVAILABLE.name) != Code.UNAVAILABLE.name:
        return NOBODY
    alone = request.prefill in (PrefillLeg.NONE, PrefillLeg.HANDED_OFF) or request.tokens > 1
    if alone or fault.reason in _OF_DECODE or _is_lack_of_blocks(fault):
        return frozenset({Leg.DECODE})
    if fault.reason in _OF_PREFILL:
        return frozenset({Leg.PREFILL})
    return EITHER


def _is_lack_of_blocks(fault: Fault) -> bool:
    """QUEUE_FULL is P's or D's; D's tells of its blocks."""
    return fault.reason is Reason.QUEUE_FULL and fault.quota is not None


class Suspects:
    """Instances that have failed a request, by their process: one that was restarted is another."""

    def __init__(self) -> None:
        self._of: dict[Leg, set[Target]] = {leg: set() for leg in Leg}

    def clear(self) -> None:
        """The request has come on: what was before counts no more."""
        for targets in self._of.values():
            targets.clear()

    def add(self, blame: Blame, fault: Fault, request: RoutedRequest) -> None:
        """Remember who failed."""
        pairing = request.pairing
        if Leg.PREFILL in blame and pairing.prefill is not None:
            self._of[Leg.PREFILL].add(pairing.prefill)
        if Leg.DECODE in blame:
            self._of[Leg.DECODE].add(request.decode)
            lacks = fault.reason is Reason.NO_BLOCKS or _is_lack_of_blocks(fault)
            if lacks and fault.metadata[LEG] == Leg.PREFILL.value:
                # P has asked every D that it was offered.
                self._of[Leg.DECODE].update((pairing.decode, *pairing.alternates))

    def another_pair(
        self,
        blame: Blame,
        prefill: Sequence[Target],
        decode: Sequence[Target],
        prefill_load: LeastLoad,
        decode_load: LeastLoad,
        aggregated: bool,
    ) -> Pairing | None:
        """The least loaded pair of ready instances without those to blame; None when there is none.

        Of a leg that is not to blame for certain, a suspect is better than nobody.
        """
        ready = {Leg.PREFILL: prefill, Leg.DECODE: decode}
        others = {leg: [t for t in ready[leg] if t not in self._of[leg]] for leg in Leg}
        if not any(others[leg] for leg in blame):
            return None
        chosen = {leg: others[leg] or ready[leg] for leg in Leg}
        if not chosen[Leg.DECODE] or not (aggregated or chosen[Leg.PREFILL]):
            return None
        return pair(chosen[Leg.PREFILL], chosen[Leg.DECODE], prefill_load, decode_load, aggregated)
