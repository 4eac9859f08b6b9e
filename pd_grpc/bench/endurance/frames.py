"""Spoiling KV on the wire: one bit of a chunk's payload, in an HTTP/2 stream that stays whole.

A bit flipped just anywhere ends the connection, for HTTP/2 notices a broken frame. So the frames
are followed, and of one that begins a large gRPC message the last byte is changed that belongs to
that message, though the message may go on in the next frame: of a KV chunk it is payload, which
comes after all else.
"""

from __future__ import annotations

from collections.abc import Callable

_PREFACE_BYTES = 24
_FRAME_HEADER_BYTES = 9
_MESSAGE_HEADER_BYTES = 5
_DATA = 0
LEAST_MESSAGE_BYTES = 400
"""Smaller messages are left alone: they are no KV chunk of the sim engine."""


class FrameSpoiler:
    """One direction of one connection, from the client to the server, from its first byte on."""

    def __init__(self) -> None:
        self._left = _PREFACE_BYTES
        """Bytes until the next frame begins."""
        self._head = bytearray()
        """A frame's header with a message's header behind it, as far as they have come."""
        self._spoil_at = -1
        """Bytes until the one to be changed; below 0 when none is."""

    def passed(self, data: bytes, wanted: Callable[[], bool]) -> bytes:
        """The bytes to be sent on in the place of `data`; `wanted` is asked at each frame that
        could be spoiled."""
        out = bytearray(data)
        at = 0
        while at < len(out):
            if self._left:
                step = min(self._left, len(out) - at)
                if 0 <= self._spoil_at < step:
                    out[at + self._spoil_at] ^= 1
                self._spoil_at = self._spoil_at - step if self._spoil_at >= step else -1
                self._left -= step
                at += step
            else:
                self._head.append(out[at])
                at += 1
                self._read_head(wanted)
        return bytes(out)

    def _read_head(self, wanted: Callable[[], bool]) -> None:
        head = self._head
        if len(head) < _FRAME_HEADER_BYTES:
            return
        size = int.from_bytes(head[:3], "big")
        small = head[3] != _DATA or size < _MESSAGE_HEADER_BYTES + LEAST_MESSAGE_BYTES
        if not small and len(head) < _FRAME_HEADER_BYTES + _MESSAGE_HEADER_BYTES:
            return
        self._left = size - (len(head) - _FRAME_HEADER_BYTES)
        if not small:
            message = int.from_bytes(head[_FRAME_HEADER_BYTES + 1 :], "big")
            begins = head[_FRAME_HEADER_BYTES] == 0 and message >= LEAST_MESSAGE_BYTES
            if begins and wanted():
                self._spoil_at = min(message, self._left) - 1
        self._head = bytearray()
