"""Every planted fault of P, one file for each part of the conversation, as the cases are."""

from pd_grpc.conformance.modules import import_modules
from tests.conformance.mutants.prefill.registry import PREFILL_MUTANTS

__all__ = ["PREFILL_MUTANTS"]

import_modules(__name__)
