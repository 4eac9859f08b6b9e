"""Finding transports by name, this package's and others'."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn

import pytest

from pd_grpc.cli.settings import SettingsError, load_settings
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.transport import inline, registry, shm
from pd_grpc.transport.base import NotUsable, ReceiveSide, TransportKind
from pd_grpc.transport.registry import UnknownTransport, find
from tests.transport.shm_pool import BLOCKS, LAYOUT


def test_transports_are_found_in_the_order_of_their_names() -> None:
    assert find(["inline", "shm"]) == [inline.TRANSPORT, shm.TRANSPORT]
    assert find(DecodeConfig().transports) == [shm.TRANSPORT, inline.TRANSPORT]


@pytest.mark.parametrize("names", [[], ["shm"]])
def test_inline_is_always_there_as_the_last(names: list[str]) -> None:
    assert find(names)[-1] is inline.TRANSPORT


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> TransportKind:
    """A transport of somebody else's, in a module of their own."""
    module = ModuleType("somebody.wires")
    kind = TransportKind("wires", 1001, False, inline.TRANSPORT.send, inline.TRANSPORT.receive)
    module.TRANSPORT = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebody", ModuleType("somebody"))
    monkeypatch.setitem(sys.modules, "somebody.wires", module)
    return kind


def test_a_name_with_a_dot_is_any_module(foreign: TransportKind) -> None:
    assert find(["somebody.wires"]) == [foreign, inline.TRANSPORT]


def test_two_transports_of_one_value_are_refused(
    foreign: TransportKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "TRANSPORT", TransportKind("mine", 1001, False, _unused, _unused))
    with pytest.raises(UnknownTransport, match="wires and mine are both 1001"):
        find(["somebody.wires", "shm"])


@pytest.mark.parametrize("name", ["carrier_pigeon", "no.such.module", "pd_grpc.nothing"])
def test_a_transport_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UnknownTransport, match=f"there is no transport {name}"):
        find([name])


def test_a_module_that_is_no_transport_is_named() -> None:
    with pytest.raises(UnknownTransport, match=r"pd_grpc\.transport\.base is no transport"):
        find(["base"])


def test_settings_name_a_transport_that_is_not_there() -> None:
    read = load_settings(DecodeConfig, ["--transports", "inline,shm"], {})
    assert read.transports == ("inline", "shm")
    for wrong in ("carrier_pigeon", "no.such.module", "in-line"):
        with pytest.raises(SettingsError, match="transports"):
            load_settings(DecodeConfig, ["--transports", wrong], {})


def test_what_cannot_be_used_here_is_left_out_and_told() -> None:
    side = ReceiveSide(LAYOUT, HostKvMemory(bytearray(BLOCKS * LAYOUT.block_bytes), LAYOUT))
    told = []
    built = registry.build(
        find(["shm", "inline"]),
        1,
        lambda kind: kind.receive(side),
        lambda kind, why: told.append((kind.name, str(why))),
    )
    assert list(built) == [inline.TRANSPORT.value]
    assert told == [("shm", "the engine's pool is not in shared memory")]


def test_an_instance_of_several_shards_says_that_nobody_writes_to_its_memory() -> None:
    told = []
    built = registry.build(
        find(["nixl", "shm", "inline"]),
        2,
        lambda kind: kind.name,
        lambda kind, why: told.append((kind.name, str(why))),
    )
    assert list(built.values()) == [(inline.TRANSPORT, "inline")]
    why = "an instance of 2 shards has no memory that P writes to"
    assert told == [("nixl", why), ("shm", why)]


def test_only_a_decode_that_shares_its_pool_makes_it_shared() -> None:
    assert DecodeConfig().shares_pool
    assert not DecodeConfig(transports=("inline",)).shares_pool
    assert not DecodeConfig(transports=()).shares_pool


def _unused(side: object) -> NoReturn:
    raise NotUsable("not meant to be used")
