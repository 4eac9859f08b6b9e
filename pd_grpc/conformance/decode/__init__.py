"""The cases for D: the kit is P and the client."""

from pd_grpc.conformance.decode.cases import DECODE_CASES
from pd_grpc.conformance.decode.subject import DecodeHand, DecodeSubject, open_decode

__all__ = ["DECODE_CASES", "DecodeHand", "DecodeSubject", "open_decode"]
