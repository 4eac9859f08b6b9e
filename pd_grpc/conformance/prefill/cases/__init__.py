"""Every case for P, one file for each part of the conversation.

Numbers: 1xx sessions, 2xx placing and Allocate, 3xx KV, 4xx first token and hand-off, 5xx failures,
6xx cancellation, 7xx refusals of the request, 8xx unknown fields and limits, 9xx drain.
"""

from pd_grpc.conformance.modules import import_modules
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES

__all__ = ["PREFILL_CASES"]

import_modules(__name__)
