"""Where the cases for P are registered."""

from __future__ import annotations

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.prefill.subject import Prefill

PREFILL_CASES: Cases[Prefill] = Cases("P")
