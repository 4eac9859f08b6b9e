"""The names of blocks, against their definition spelt out with hashlib and struct alone."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.protocol.block_hashes import HASH_BYTES, BlockChain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def spelt_out(
    tokens: list[int], size: int, salt: bytes = b"", adapter: bytes = b"", media: bytes = b""
) -> list[bytes]:
    root = struct.pack("<I", len(adapter)) + adapter + struct.pack("<I", len(media) // 32) + media
    name = hashlib.sha256(root + struct.pack("<I", len(salt)) + salt).digest()[:16]
    names = []
    for start in range(0, len(tokens) - size + 1, size):
        block = struct.pack(f"<{size}I", *tokens[start : start + size])
        name = hashlib.sha256(name + block).digest()[:16]
        names.append(name)
    return names


@given(tokens=TOKENS, size=st.integers(1, 9), salt=st.binary(max_size=8))
def test_the_names_are_those_of_the_definition(tokens: list[int], size: int, salt: bytes) -> None:
    assert BlockChain(size, salt).names(tokens, len(tokens) // size) == spelt_out(
        tokens, size, salt
    )


def test_adapter_and_media_are_part_of_every_name() -> None:
    media = [bytes([i]) * 32 for i in range(2)]
    chain = BlockChain(2, b"salt", "lora-1", media)
    assert chain.names([1, 2, 3, 4], 2) == spelt_out(
        [1, 2, 3, 4], 2, b"salt", b"lora-1", b"".join(media)
    )


def test_a_name_known_by_heart() -> None:
    """For another implementation to compare with."""
    (name,) = BlockChain(4).names([1, 2, 3, 4], 1)
    assert name.hex() == "42e9362c9a2ea24f5db4edb5ba6d4bbb"


@given(tokens=TOKENS, steps=st.lists(st.integers(0, 10), max_size=5))
def test_names_made_in_steps_are_the_same(tokens: list[int], steps: list[int]) -> None:
    chain = BlockChain(4)
    for step in steps:
        count = min(step, len(tokens) // 4)
        assert chain.names(tokens, count) == BlockChain(4).names(tokens, count)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=8, max_size=12),
    other=st.lists(st.integers(0, 3), min_size=8, max_size=12),
)
def test_names_are_equal_as_far_as_the_tokens_are(tokens: list[int], other: list[int]) -> None:
    ours, theirs = BlockChain(2).names(tokens, 4), BlockChain(2).names(other, 4)
    for block in range(4):
        same = tokens[: 2 * block + 2] == other[: 2 * block + 2]
        assert (ours[block] == theirs[block]) is same
    assert {len(name) for name in ours} == {HASH_BYTES}


def test_another_salt_has_no_name_in_common() -> None:
    tokens = list(range(20))
    chains = [BlockChain(2, salt).names(tokens, 10) for salt in (b"", b"a", b"b", b"a\0")]
    assert len({name for names in chains for name in names}) == 40


def test_more_blocks_than_there_are_tokens_have_no_names() -> None:
    with pytest.raises(ValueError, match="7 tokens"):
        BlockChain(4).names(list(range(7)), 2)
