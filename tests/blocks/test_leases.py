"""Leases: a grant lives as long as somebody says it does."""

from __future__ import annotations

from pd_grpc.blocks.leases import Leases


def test_a_lease_ends_when_nobody_renews_it() -> None:
    leases = Leases(15.0)
    leases.start("g", 100.0)
    assert "g" in leases and leases.ends_at("g") == leases.next() == 115.0
    assert leases.pop_expired(114.9) == []
    assert leases.pop_expired(115.0) == ["g"]
    assert "g" not in leases and leases.next() is None


def test_a_renewed_lease_lives_from_the_renewal() -> None:
    leases = Leases(15.0)
    leases.start("g", 100.0)
    assert leases.renew("g", 110.0)
    assert leases.pop_expired(124.9) == []
    assert leases.pop_expired(125.0) == ["g"]


def test_what_has_ended_cannot_be_renewed() -> None:
    leases = Leases(15.0)
    assert not leases.renew("g", 0.0)
    leases.start("g", 0.0)
    leases.end("g")
    assert not leases.renew("g", 1.0)
    leases.start("g", 2.0)
    leases.pop_expired(100.0)
    assert not leases.renew("g", 100.0)
    assert leases.ends_at("g") is None


def test_leases_end_in_order() -> None:
    leases = Leases(10.0)
    for at, grant in enumerate(["a", "b", "c"]):
        leases.start(grant, float(at))
    leases.renew("a", 5.0)
    assert leases.pop_expired(100.0) == ["b", "c", "a"]


def test_ending_what_is_unknown_is_nothing() -> None:
    leases = Leases(10.0)
    leases.end("g")
    assert leases.next() is None
