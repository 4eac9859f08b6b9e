"""Which messages a rule strikes."""

from __future__ import annotations

import random

import pytest

from pd_grpc.testing.faults import WHOLE, CallFates, Direction, Fate, Injector, Kind, Rule, flip_bit

METHOD = "/pd_grpc.v1.DecodeService/Allocate"
BOTH = frozenset(Direction)


def drops(call: CallFates, messages: int = 8) -> list[int]:
    """The numbers of the requests that are dropped."""
    return [n for n in range(1, messages + 1) if call.request().dropped]


def test_without_a_rule_nothing_happens() -> None:
    call = Injector().begin(METHOD, BOTH)
    assert all(call.request() is call.response() is WHOLE for _ in range(5))


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("*", True),
        ("Allocate", True),
        ("All*", True),
        ("Release", False),
        ("DecodeService", False),
        ("/pd_grpc.v1.DecodeService/*", True),
        (METHOD, True),
        ("/pd_grpc.v1.AdminService/*", False),
    ],
)
def test_a_method_is_named_in_full_or_by_its_last_part(pattern: str, fits: bool) -> None:
    injector = Injector(Rule(Kind.DROP, pattern))
    assert injector.begin(METHOD).request().dropped is fits


def test_a_rule_counts_messages_calls_and_its_own_strikes() -> None:
    numbered = Rule(Kind.DROP, messages=range(3, 5))
    injector = Injector(numbered)
    assert drops(injector.begin(METHOD, BOTH)) == [3, 4]
    injector.remove(numbered)
    second = injector.add(Rule(Kind.DROP, calls={3}, times=2))
    assert drops(injector.begin(METHOD, BOTH)) == []
    assert drops(injector.begin("/another/Method", BOTH)) == []
    assert drops(injector.begin(METHOD, BOTH)) == [1, 2]
    assert (injector.strikes(second), injector.strikes()) == (2, 4)
    injector.clear()
    assert injector.begin(METHOD, BOTH).request() is WHOLE


def test_directions_are_struck_apart() -> None:
    call = Injector(Rule(Kind.DROP, direction=Direction.RESPONSE)).begin(METHOD)
    assert (call.request().dropped, call.response().dropped) == (False, True)


def test_the_same_seed_makes_the_same_faults_and_another_seed_others() -> None:
    def run(seed: int) -> list[list[int]]:
        injector = Injector(Rule(Kind.DROP, probability=0.5), seed=seed)
        return [drops(injector.begin(METHOD, BOTH)) for _ in range(20)]

    assert run(1) == run(1) != run(2)
    struck = sum(map(len, run(1)))
    assert 50 < struck < 110, f"{struck} of 160 at a probability of one half"


def test_what_strikes_together_adds_up() -> None:
    injector = Injector(
        Rule(Kind.DELAY, delay_s=0.1),
        Rule(Kind.DELAY, delay_s=(0.2, 0.3)),
        Rule(Kind.DUPLICATE, delay_s=0.5),
        Rule(Kind.DROP),
    )
    fate = injector.begin(METHOD).request()
    assert 0.3 <= fate.delay_s <= 0.4
    assert (fate.dropped, fate.duplicated, fate.copy_delay_s) == (True, True, 0.5)


def test_what_cannot_happen_to_a_unary_message_does_not() -> None:
    rules = [Rule(Kind.HALF_CLOSE, direction=each) for each in Direction]
    rules.append(Rule(Kind.DUPLICATE, direction=Direction.RESPONSE))
    injector = Injector(*rules)
    call = injector.begin(METHOD)
    assert call.request() is call.response() is WHOLE and injector.strikes() == 0
    stream = injector.begin(METHOD, BOTH)
    assert stream.request() == Fate(half_closed=True)
    assert stream.response() == Fate(half_closed=True, duplicated=True)


def test_one_bit_of_a_message_is_flipped() -> None:
    data = bytes(range(64))
    damaged = flip_bit(data, random.Random(3))
    changed = [a ^ b for a, b in zip(data, damaged, strict=True)]
    assert sum(bin(each).count("1") for each in changed) == 1
    assert flip_bit(b"", random.Random(3)) == b""


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": Kind.DROP, "probability": 1.1},
        {"kind": Kind.DELAY},
        {"kind": Kind.DELAY, "delay_s": (2.0, 1.0)},
        {"kind": Kind.DELAY, "delay_s": -1.0},
        {"kind": Kind.DROP, "delay_s": 1.0},
    ],
)
def test_a_rule_that_contradicts_itself_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Rule(**fields)  # type: ignore[arg-type]
