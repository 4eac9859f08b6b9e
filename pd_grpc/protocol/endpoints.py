"""host:port, as everything here is reached at, written and read in one way."""

from __future__ import annotations

import errno
import re
import socket

MAX_PORT = 65535
MAX_CHARS = 300
"""A name of DNS has 253, an IPv6 address with its zone far fewer."""
_HOST = r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])"
_ENDPOINT = re.compile(rf"{_HOST}:([0-9]+)")

ENDPOINT_LIMIT = f"must be host:port with a port from 1 to {MAX_PORT}"
"""What a field that holds one is told when it is wrong, whatever its length."""


class PortInUse(Exception):
    """A server cannot listen where it should; the message names the address and says why."""


def address(host: str, port: int) -> str:
    """host:port, with the brackets an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_endpoint(endpoint: str, lowest_port: int = 1) -> str:
    """`endpoint` if it is host:port with a port from 1 to 65535; ValueError says what it lacks.
    Where one listens, `lowest_port` may be 0: any free one."""
    if len(endpoint) > MAX_CHARS:
        raise ValueError(f"must be host:port, in at most {MAX_CHARS} characters")
    found = _ENDPOINT.fullmatch(endpoint) if endpoint.isascii() else None
    if found is None:
        raise ValueError(f"must be host:port (an IPv6 address in brackets), not {endpoint!r}")
    if not lowest_port <= int(found[1]) <= MAX_PORT:
        raise ValueError(f"must have a port from {lowest_port} to {MAX_PORT}, not {endpoint!r}")
    return endpoint


def split_address(endpoint: str) -> tuple[str, int]:
    """Host, without the brackets of an IPv6 address, and port of what `check_endpoint` passed."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def check_can_listen(host: str, port: int) -> None:
    """PortInUse, in the system's own words, when no socket can be bound there; port 0 is any.

    A name may mean several addresses. One that is in use is enough to fail; one that this machine
    does not have is not, as long as another can be bound.
    """
    wanted = address(host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise PortInUse(f"cannot listen on {wanted}: {why}") from error
    failures = []
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            # As grpc does: a port whose last connections are still dying can be taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                failures.append(error)
    in_use = [error for error in failures if error.errno == errno.EADDRINUSE]
    if in_use or len(failures) == len(found):
        cause = (in_use or failures)[0]
        raise PortInUse(f"cannot listen on {wanted}: {cause.strerror}") from cause
