"""The judge: numbered cases that drive an implementation of pd_grpc.v1 over gRPC alone.

A case quotes the rule it tests, word for word from the protocol's reference, and knows the subject
only by its endpoint: what the subject is written in, and by whom, makes no difference. What is
exported here is for cases of one's own.
"""

from pd_grpc.conformance.case import Broken, Case, Cases, NotApplicable, expect
from pd_grpc.conformance.run import Result, run_cases

__all__ = ["Broken", "Case", "Cases", "NotApplicable", "Result", "expect", "run_cases"]
