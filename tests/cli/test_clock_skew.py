"""Instances of several machines on one time axis."""

from __future__ import annotations

import pytest

from pd_grpc.cli.clock_skew import skews_ns
from pd_grpc.telemetry.partition import Work

MS = 1_000_000
HOUR = 3_600_000 * MS
CALL = "pd_grpc.v1.PrefillService/Prefill"
ASK = "pd_grpc.v1.DecodeService/Allocate"


def work(
    name: str, of: str, at_ms: int, length_ms: int, parent: str = "", skew_ns: int = 0
) -> Work:
    return Work(f"{name} of {of}", parent, name, of, at_ms * MS + skew_ns, length_ms / 1000)


def trace(p_ns: int = 0, d_ns: int = 0, calls: bool = True) -> list[Work]:
    """Of a router, a P and a D whose clocks are ahead of the router's by so much."""
    found = [
        work("pd.request", "r", 0, 100),
        work(
            "pd.prefill_request", "p", 4, 76, f"{CALL} of p" if calls else "pd.request of r", p_ns
        ),
        work("pd.allocate", "p", 10, 20, "pd.prefill_request of p", p_ns),
        work("pd.reserve", "d", 15, 10, f"{ASK} of d" if calls else "pd.allocate of p", d_ns),
        # It outlives what it is a part of, and says nothing about clocks.
        work("pd.receive", "d", 25, 50, f"{ASK} of d" if calls else "pd.allocate of p", d_ns),
        work("pd.decode", "d", 75, 20, "pd.request of r", d_ns),
    ]
    if calls:
        found += [
            work(CALL, "r", 2, 80, "pd.request of r"),
            work(CALL, "p", 3, 78, f"{CALL} of r", p_ns),
            work(ASK, "p", 11, 18, "pd.allocate of p", p_ns),
            work(ASK, "d", 12, 15, f"{ASK} of p", d_ns),
        ]
    return found


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("ahead_ns", [0, 3 * MS, -3 * MS])
def test_clocks_that_agree_are_believed(ahead_ns: int, calls: bool) -> None:
    assert set(skews_ns(trace(ahead_ns, -ahead_ns, calls)).values()) == {0}


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize(("p_ns", "d_ns"), [(HOUR, -HOUR), (500 * MS, 0), (0, -90 * MS)])
def test_an_instance_whose_clock_does_not_is_drawn_where_it_was_waited_for(
    p_ns: int, d_ns: int, calls: bool
) -> None:
    spans = trace(p_ns, d_ns, calls)
    found = skews_ns(spans)
    assert found == skews_ns(spans[::-1])
    assert found["r"] == 0
    # As exactly as the wait was longer than the work.
    assert found["p"] + p_ns == pytest.approx(0, abs=20 * MS)
    assert found["d"] + d_ns == pytest.approx(0, abs=20 * MS)


def test_the_caller_of_all_is_believed_though_its_clock_is_the_last() -> None:
    found = skews_ns(trace(-HOUR, -HOUR))
    assert found["r"] == 0 and found["p"] > 0 and found["d"] > 0


def test_what_nobody_is_known_to_have_waited_for_stays_where_it_is() -> None:
    assert skews_ns([]) == {}
    alone = [work("pd.compute", "p", 0, 5), work("pd.decode", "d", 3, 5, "gone", HOUR)]
    assert skews_ns(alone) == {"p": 0, "d": 0}


def test_a_call_that_gave_up_says_nothing_about_clocks() -> None:
    # D was frozen, and served the call and the answer long after everybody had left.
    spans = [
        work("pd.request", "r", 0, 100),
        work(CALL, "r", 2, 80, "pd.request of r"),
        work(CALL, "p", 3, 78, f"{CALL} of r"),
        work("pd.prefill_request", "p", 4, 76, f"{CALL} of p"),
        work("pd.allocate", "p", 10, 20, "pd.prefill_request of p"),
        work(ASK, "p", 11, 18, "pd.allocate of p"),
        work(ASK, "d", 12, 8000, f"{ASK} of p"),
        work("pd.reserve", "d", 15, 7900, f"{ASK} of d"),
        work("pd.decode", "d", 75, 20_000, "pd.request of r"),
    ]
    assert set(skews_ns(spans).values()) == {0}
