"""The names of blocks: a hash for each whole block of a prompt, over all that its KV depends on.

`sha256-128-chain`: the name of block b is the first 16 bytes of

    SHA-256( name[b-1] || LE32(token) for each token of block b )

and the name before the first block is the first 16 bytes of

    SHA-256( LE32(bytes of adapter) || adapter || LE32(number of media hashes) || media hashes
             || LE32(bytes of salt) || salt )

where LE32 is a little-endian unsigned integer and `||` joins bytes. Two blocks of one layout have
the same name only if all tokens up to their ends, adapter, media and salt are the same.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

HASH_ALGORITHM = "sha256-128-chain"
HASH_BYTES = 16
SALT_BYTES = 64
"""The longest cache salt."""

_UINT32 = "I" if array("I").itemsize == 4 else "L"


class BlockChain:
    """The names of one request's blocks, made as far as they are asked for and never twice."""

    __slots__ = ("_block_size", "_names", "_root", "salt")

    def __init__(
        self,
        block_size: int,
        salt: bytes = b"",
        adapter: str = "",
        media_hashes: Sequence[bytes] = (),
    ) -> None:
        self.salt = salt
        """What it was made with."""
        self._block_size = block_size
        self._root = _root(salt, adapter, media_hashes)
        self._names: list[bytes] = []

    def names(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Of the first `count` whole blocks of `tokens`, which only grow from call to call.
        ValueError when there are not so many tokens."""
        done = len(self._names)
        if count > done:
            start, end = done * self._block_size, count * self._block_size
            if end > len(tokens):
                raise ValueError(f"{len(tokens)} tokens have no {count} whole blocks")
            self._extend(tokens[start:end])
        return self._names[:count]

    def _extend(self, tokens: Sequence[int]) -> None:
        words = array(_UINT32, tokens)
        if sys.byteorder == "big":
            words.byteswap()
        packed = words.tobytes()
        name = self._names[-1] if self._names else self._root
        size = 4 * self._block_size
        for at in range(0, len(packed), size):
            name = hashlib.sha256(name + packed[at : at + size]).digest()[:HASH_BYTES]
            self._names.append(name)


def _root(salt: bytes, adapter: str, media_hashes: Sequence[bytes]) -> bytes:
    name = adapter.encode()
    parts = [struct.pack("<I", len(name)), name, struct.pack("<I", len(media_hashes))]
    parts += [*media_hashes, struct.pack("<I", len(salt)), salt]
    return hashlib.sha256(b"".join(parts)).digest()[:HASH_BYTES]
