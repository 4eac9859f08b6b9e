"""What is taken for host:port."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.endpoints import check_endpoint, split_address


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:1", "localhost:50050", "[::1]:65535", "[fe80::1%eth0]:1", "a_b-c.d:80"]
)
def test_a_host_with_a_port_is_an_endpoint(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


def test_where_one_listens_port_0_may_mean_any() -> None:
    assert check_endpoint("127.0.0.1:0", lowest_port=0) == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("endpoint", "parts"), [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:65535", ("::1", 65535))]
)
def test_an_address_falls_into_host_and_port(endpoint: str, parts: tuple[str, int]) -> None:
    assert split_address(endpoint) == parts


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "foo",
        ":1",
        "h:",
        "h:p",
        "h:-1",
        "h:1:2",
        "::1:50",
        "h :1",
        "http://h:1",
        "h:1/x",
        "h:1\n",
    ],
)
def test_anything_else_is_none_and_is_shown(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port") as raised:
        check_endpoint(endpoint)
    assert repr(endpoint) in str(raised.value)


@pytest.mark.parametrize("port", ["0", "65536", "99999999"])
def test_a_port_has_its_bounds(port: str) -> None:
    with pytest.raises(ValueError, match=r"a port from 1 to 65535, not 'h:"):
        check_endpoint(f"h:{port}")


def test_one_that_does_not_end_is_none_and_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"in at most 300 characters$"):
        check_endpoint("h" * 200_000 + ":1")
