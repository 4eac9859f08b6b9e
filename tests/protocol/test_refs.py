"""Names, epochs and refs: which are well formed, and which process is the newer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.clock import ManualClock, SystemClock
from pd_grpc.protocol.refs import (
    MAX_NAME_CHARS,
    TransferKey,
    key_of,
    mint_epoch,
    mint_id,
    name_errors,
    ref_errors,
)
from pd_grpc.v1.types_pb2 import TransferRef


@given(wall_ms=st.integers(1, 2**44 - 2), later_ms=st.integers(1, 10**9))
def test_the_epoch_of_a_later_start_is_greater_whatever_the_dice(
    wall_ms: int, later_ms: int
) -> None:
    first = mint_epoch(ManualClock(wall_ns=wall_ms * 1_000_000))
    later = min(wall_ms + later_ms, 2**44 - 1)
    second = mint_epoch(ManualClock(wall_ns=later * 1_000_000))
    assert 0 < first < second < 2**64


def test_an_epoch_carries_its_start_in_the_upper_44_bits() -> None:
    clock = ManualClock(wall_ns=1_700_000_000_123_999_999)
    assert mint_epoch(clock) >> 20 == 1_700_000_000_123


def test_processes_started_in_one_millisecond_have_different_epochs() -> None:
    clock = ManualClock()
    # 20 random bits: two of eight are equal once in 37,000 runs, all eight never.
    assert len({mint_epoch(clock) for _ in range(8)}) > 1


def test_a_minted_id_is_a_transfer_id_with_128_random_bits() -> None:
    first, second = mint_id("t"), mint_id("t")
    assert first != second
    assert len(first.removeprefix("t-")) * 4 == 128
    assert ref_errors(TransferRef(transfer_id=first, attempt=1)) == []


@pytest.mark.parametrize("transfer_id", ["a", "A9._:-", "x" * 128])
def test_a_well_formed_ref_passes(transfer_id: str) -> None:
    ref = TransferRef(transfer_id=transfer_id, attempt=1)
    assert ref_errors(ref) == []
    assert key_of(ref) == TransferKey(transfer_id, 1)
    assert str(key_of(ref)) == f"{transfer_id}#1"


@pytest.mark.parametrize("transfer_id", ["", "x" * 129, "a b", "a\n", "ä", "a/b", "a#1", "٣"])
def test_a_malformed_transfer_id_is_refused_by_name(transfer_id: str) -> None:
    (wrong,) = ref_errors(TransferRef(transfer_id=transfer_id, attempt=1))
    assert wrong.field == "ref.transfer_id"
    assert "1 to 128" in wrong.description


def test_attempts_count_from_one_and_both_fields_are_named() -> None:
    wrong = ref_errors(TransferRef(), prefix="handoff.ref")
    assert [error.field for error in wrong] == ["handoff.ref.transfer_id", "handoff.ref.attempt"]


def test_a_greater_attempt_is_another_key() -> None:
    first = key_of(TransferRef(transfer_id="t", attempt=1, decode_epoch=5))
    assert first == key_of(TransferRef(transfer_id="t", attempt=1, decode_epoch=6))
    assert first != key_of(TransferRef(transfer_id="t", attempt=2, decode_epoch=5))


def test_a_name_is_bounded_and_may_be_required() -> None:
    assert name_errors("", "request_id") == []
    assert name_errors("x" * MAX_NAME_CHARS, "request_id", required=True) == []
    (long,) = name_errors("x" * (MAX_NAME_CHARS + 1), "request_id")
    assert (long.field, long.description) == ("request_id", "must have 0 to 128 characters")
    (missing,) = name_errors("", "hello.instance.name", required=True)
    assert missing.description == "must have 1 to 128 characters"


def test_a_manual_clock_moves_only_forward_and_takes_the_wall_along() -> None:
    clock = ManualClock(start_s=10.0, wall_ns=5_000_000_000)
    assert clock.advance(1.5) == clock.now() == 11.5
    assert clock.wall_ns() == 6_500_000_000
    with pytest.raises(ValueError, match="cannot move back"):
        clock.advance(-1)
    assert clock.now() == 11.5


def test_the_systems_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.wall_ns() > 1_700_000_000_000_000_000
