"""Who is to blame for a failure, and who is left to try instead.

A fault says what happened, and on which leg it was told. That is not always who is at fault: P
hears of D's failures and D of P's, and each tells them on its own leg. Where it cannot be known,
both are suspects, and another pair is one in which at least one of them is replaced, both if that
can be. So it is with a D that P does not reach: it may be P that reaches nobody, and the less such
a P has to do, the more requests it would be given.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.protocol.faults import Code, Fault, Reason, Retry, TransportFault
from pd_grpc.router.machine import LEG, STATUS, Leg, PrefillLeg, RoutedRequest
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair

Blame = frozenset[Leg]

NOBODY: Blame = frozenset()
EITHER: Blame = frozenset(Leg)

_OF_PREFILL = frozenset({Reason.PREFILL_LOST, Reason.SENDER_STUCK})
_OF_DECODE = frozenset({Reason.DECODE_LOST, Reason.NO_BLOCKS})
_LOSSES = frozenset({Reason.PREFILL_LOST, Reason.DECODE_LOST})
_GONE = frozenset(code.name for code in Code if TransportFault(code, "").peer_lost)
"""Bare statuses of a leg whose instance is gone; what we have cancelled is heard no more."""


def blamed(fault: Fault, request: RoutedRequest) -> Blame:
    """The legs one of which another try must take elsewhere: one for certain, or either. NOBODY
    where no other try helps: the status table says never, the fault is of no leg, or it is a bare
    status that does not mean that the instance is gone."""
    if LEG not in fault.metadata or fault.retry is not Retry.OTHER:
        return NOBODY
    if fault.metadata.get(STATUS, Code.UNAVAILABLE.name) not in _GONE:
        return NOBODY
    alone = request.prefill in (PrefillLeg.NONE, PrefillLeg.HANDED_OFF) or request.tokens > 1
    unreached = fault.reason is Reason.DECODE_LOST and fault.metadata[LEG] == Leg.PREFILL.value
    if unreached and not alone:
        return EITHER
    if alone or fault.reason in _OF_DECODE or _is_lack_of_blocks(fault):
        return frozenset({Leg.DECODE})
    if fault.reason in _OF_PREFILL:
        return frozenset({Leg.PREFILL})
    return EITHER


def _is_lack_of_blocks(fault: Fault) -> bool:
    """QUEUE_FULL is P's or D's; D's tells of its blocks."""
    return fault.reason is Reason.QUEUE_FULL and fault.quota is not None


class Suspects:
    """Instances that have failed a request, by their process: one that was restarted is another.

    `_of` has all of them, `_lost` those that were lost before whoever failed last.
    """

    def __init__(self) -> None:
        self._of = _nobody()
        self._lost = _nobody()
        self._last_lost = _nobody()

    def clear(self) -> None:
        """The request has come on: what was before counts no more."""
        for sets in (self._of, self._lost, self._last_lost):
            for targets in sets.values():
                targets.clear()

    def add(self, blame: Blame, fault: Fault, request: RoutedRequest) -> None:
        """Remember who failed."""
        pairing = request.pairing
        failed = _nobody()
        if Leg.PREFILL in blame and pairing.prefill is not None:
            failed[Leg.PREFILL].add(pairing.prefill)
        if Leg.DECODE in blame:
            failed[Leg.DECODE].add(request.decode)
            lacks = fault.reason is Reason.NO_BLOCKS or _is_lack_of_blocks(fault)
            if lacks and fault.metadata[LEG] == Leg.PREFILL.value:
                # P has asked every D that it was offered.
                failed[Leg.DECODE].update((pairing.decode, *pairing.alternates))
        for leg in Leg:
            self._of[leg] |= failed[leg]
            self._lost[leg] = (self._lost[leg] | self._last_lost[leg]) - failed[leg]
        self._last_lost = failed if fault.reason in _LOSSES else _nobody()

    def lost_before(self, blame: Blame) -> bool:
        """Whether somebody of those to blame was lost, and then another failed: most often one
        trouble had them both, or the first is back."""
        return any(self._lost[leg] for leg in blame)

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


def _nobody() -> dict[Leg, set[Target]]:
    return {leg: set() for leg in Leg}
