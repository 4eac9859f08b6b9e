"""The cases for P: the kit is D and the router."""

from pd_grpc.conformance.prefill.cases import PREFILL_CASES
from pd_grpc.conformance.prefill.subject import PrefillHand, PrefillSubject, open_prefill

__all__ = ["PREFILL_CASES", "PrefillHand", "PrefillSubject", "open_prefill"]
