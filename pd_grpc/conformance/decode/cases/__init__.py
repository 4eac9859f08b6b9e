"""Every case for D, one file for each part of the conversation.

Numbers: 1xx sessions, 2xx Allocate, 3xx Transfer, 4xx first token and hand-off, 5xx ends and
tombstones, 6xx client legs, 7xx reserved features, 8xx unknown fields and sizes, 9xx drain.
"""

from pd_grpc.conformance.decode.cases.registry import DECODE_CASES
from pd_grpc.conformance.modules import import_modules

__all__ = ["DECODE_CASES"]

import_modules(__name__)
