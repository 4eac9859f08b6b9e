"""D64x: a D that does not compare the legs of a hand-over, or compares them too strictly."""

from __future__ import annotations

import pytest

from pd_grpc.decode import checks
from pd_grpc.decode.transfer import ClientLeg
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.protocol.tombstones import Tombstones
from pd_grpc.v1 import decode_pb2, sampling_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def overlook(patch: pytest.MonkeyPatch, part: str) -> None:
    """Do not compare one part of the legs."""
    right = checks.unlike

    def wrong(allocate: decode_pb2.AllocateRequest, client: ClientLeg) -> Fault | None:
        fault = right(allocate, client)
        return None if fault is not None and fault.metadata["part"] == part else fault

    patch.setattr(checks, "unlike", wrong)


@mutant("D640")
def a_second_leg_of_p_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pd_grpc.decode.prefill_desk.legs_differ", lambda transfer: None)


@mutant("D641")
def a_second_leg_of_the_client_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pd_grpc.decode.client_desk.legs_differ", lambda transfer: None)


@mutant("D642")
def lengths_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    overlook(patch, "prompt_tokens")
    overlook(patch, "prompt_digest")


@mutant("D643")
def sampling_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    overlook(patch, "sampling")


@mutant("D644")
def the_output_asked_for_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    overlook(patch, "max_new_tokens")


@mutant("D645")
def a_default_is_not_the_value(patch: pytest.MonkeyPatch) -> None:
    def wrong(p: sampling_pb2.SamplingParams) -> Sampling:
        filled = sampling_pb2.SamplingParams()
        filled.CopyFrom(p)
        if not p.HasField("top_p"):
            filled.top_p = 0.999
        return sampling_from_proto(filled)

    patch.setattr("pd_grpc.decode.checks.sampling_from_proto", wrong)


@mutant("D646")
def a_mismatch_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Tombstones.add

    def wrong(self, key, record, now):  # type: ignore[no-untyped-def]
        if record.fault is None or record.fault.reason is not Reason.HANDOFF_MISMATCH:
            right(self, key, record, now)

    patch.setattr(Tombstones, "add", wrong)
