"""Every planted fault of D, one file for each part of the conversation, as the cases are."""

from pd_grpc.conformance.modules import import_modules
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS

__all__ = ["DECODE_MUTANTS"]

import_modules(__name__)
