"""Messages of the connection between a shard of D and a P that writes to its pool."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

LARGEST_MESSAGE = 1 << 20
HANDSHAKE_S = 5.0
"""How long either side waits for each message of the other's until P is attached."""
BEAT_S = 2.0
SILENT_S = 15.0
"""Who has heard nothing for so long ends what the other can do."""
_SIZE = struct.Struct(">I")

M = TypeVar("M", bound=Message)


class Ended(Exception):
    """The other side has closed the connection."""


class Unclear(Exception):
    """What came is no message of these, or the connection has failed, of which the other side may
    not know."""


class Connection:
    """One connection, either side of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def loopback(self) -> bool:
        """Whether both ends are on this machine's own network."""
        host = self._writer.get_extra_info("peername")[0].partition("%")[0]
        return ipaddress.ip_address(host).is_loopback

    async def send(self, message: Message) -> None:
        """Send a message. Ended or Unclear when it does not go out."""
        data = message.SerializeToString()
        try:
            self._writer.write(_SIZE.pack(len(data)) + data)
            await self._writer.drain()
        except OSError as error:
            raise _failure(error) from error

    async def receive(self, kind: type[M], timeout_s: float | None = None) -> M:
        """The next message. Ended or Unclear when there is none, TimeoutError when it takes too
        long."""
        try:
            return await asyncio.wait_for(self._message(kind), timeout_s)
        except asyncio.IncompleteReadError as error:
            raise Ended("the other side has closed the connection") from error
        except DecodeError as error:
            raise Unclear("what came is no message of these") from error
        except OSError as error:
            # From 3.11 on asyncio's own is one of these too.
            if isinstance(error, asyncio.TimeoutError) and error.errno is None:
                raise
            raise _failure(error) from error

    async def _message(self, kind: type[M]) -> M:
        (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
        if size > LARGEST_MESSAGE:
            raise Unclear(f"a message of {size} bytes was announced")
        return kind.FromString(await self._reader.readexactly(size))

    async def close(self) -> None:
        """Close it; what was sent goes out."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _failure(error: OSError) -> Ended | Unclear:
    """A process that is gone resets its connections."""
    kind = Ended if isinstance(error, ConnectionError) else Unclear
    return kind(error.strerror or str(error))
