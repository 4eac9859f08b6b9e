"""Who gets the next request."""

from __future__ import annotations

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair

P1, P2 = Target("p1", "h:1"), Target("p2", "h:2")
D1, D2, D3 = (Target(f"d{i}", f"h:1{i}") for i in (1, 2, 3))


def test_idle_instances_take_turns() -> None:
    load = LeastLoad()
    chosen = []
    for _ in range(6):
        first = load.ranked([D1, D2, D3])[0]
        load.charge(first.endpoint, 10)
        load.discharge(first.endpoint, 10)
        chosen.append(first.name)
    assert chosen == ["d1", "d2", "d3", "d1", "d2", "d3"]


def test_fewest_tokens_in_flight_go_first_however_many_requests_they_are() -> None:
    load = LeastLoad()
    load.charge(D1.endpoint, 1000)
    for _ in range(3):
        load.charge(D2.endpoint, 10)
    assert [t.name for t in load.ranked([D1, D2])] == ["d2", "d1"]


def test_an_instance_is_as_free_as_before_once_its_requests_have_ended() -> None:
    load = LeastLoad()
    load.charge(D1.endpoint, 7)
    load.charge(D1.endpoint, 8)
    load.discharge(D1.endpoint, 7)
    load.discharge(D1.endpoint, 8)
    assert load.in_flight(D1.endpoint) == (0, 0)


def test_a_pair_is_the_least_loaded_of_each_role_with_every_other_decode_as_alternate() -> None:
    prefill_load, decode_load = LeastLoad(), LeastLoad()
    prefill_load.charge(P1.endpoint, 1)
    decode_load.charge(D1.endpoint, 5)
    decode_load.charge(D2.endpoint, 9)
    paired = pair([P1, P2], [D1, D2, D3], prefill_load, decode_load, aggregated=False)
    assert paired == Pairing(P2, D3, (D1, D2))


def test_aggregated_needs_a_decode_instance_alone() -> None:
    assert pair([], [D1, D2], LeastLoad(), LeastLoad(), aggregated=True) == Pairing(None, D1)


@pytest.mark.parametrize(
    ("prefill", "decode", "aggregated", "role"),
    [([], [D1], False, "prefill"), ([P1], [], False, "decode"), ([P1], [], True, "decode")],
)
def test_the_role_that_lacks_is_named(
    prefill: list[Target], decode: list[Target], aggregated: bool, role: str
) -> None:
    with pytest.raises(Fault) as raised:
        pair(prefill, decode, LeastLoad(), LeastLoad(), aggregated)
    assert raised.value.reason is Reason.NO_INSTANCE
    assert raised.value.metadata == {"role": role}
