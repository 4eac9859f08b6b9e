"""Where the cases for D are registered."""

from __future__ import annotations

from pd_grpc.conformance.case import Cases
from pd_grpc.conformance.decode.subject import DecodeHand

DECODE_CASES: Cases[DecodeHand] = Cases("D")
