"""Where the cases for P are registered."""

from __future__ import annotations

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.prefill.subject import PrefillHand

PREFILL_CASES: Cases[PrefillHand] = Cases("P")
