from __future__ import annotations

import pytest

from pd_grpc.bench.endurance.frames import LEAST_MESSAGE_BYTES, FrameSpoiler

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS = 0, 1


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def message(size: int) -> bytes:
    """A gRPC message of `size` bytes with its header."""
    return b"\0" + size.to_bytes(4, "big") + b"\x55" * size


def changed(before: bytes, after: bytes) -> list[int]:
    """Where they differ."""
    assert len(before) == len(after)
    return [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]


SMALL = frame(HEADERS, b"\x01" * 600) + frame(DATA, message(40))
LARGE = frame(DATA, message(1000) + message(20))
STREAM = PREFACE + SMALL + LARGE + SMALL


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 16])
def test_one_bit_at_the_end_of_a_large_message_is_another_one(piece: int) -> None:
    spoiler = FrameSpoiler()
    pieces = [STREAM[i : i + piece] for i in range(0, len(STREAM), piece)]
    out = b"".join(spoiler.passed(each, lambda: True) for each in pieces)
    (at,) = changed(STREAM, out)
    assert at == len(PREFACE + SMALL) + 9 + 5 + 1000 - 1
    assert out[at] ^ STREAM[at] == 1


def test_of_a_message_in_two_frames_the_end_of_the_first_one_is_spoiled() -> None:
    whole = message(2000)
    stream = PREFACE + frame(DATA, whole[:1500]) + frame(DATA, whole[1500:])
    (at,) = changed(stream, FrameSpoiler().passed(stream, lambda: True))
    assert at == len(PREFACE) + 9 + 1500 - 1


def test_nothing_changes_unless_it_is_wanted_or_where_all_is_small() -> None:
    assert FrameSpoiler().passed(STREAM, lambda: False) == STREAM
    small = PREFACE + frame(DATA, message(LEAST_MESSAGE_BYTES - 1)) * 3
    assert FrameSpoiler().passed(small, lambda: True) == small
