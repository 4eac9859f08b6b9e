"""The bars of the waterfall lie where the time was spent."""

from __future__ import annotations

from rich.console import Console

from pd_grpc.cli.waterfall import Bar, bars, time_to_first_token_ms, waterfall

TIMINGS = {
    "route": 1.0,
    "queue": 2.0,
    "prepare": 4.0,
    "allocate": 3.0,
    "compute": 20.0,
    "first_token": 3.0,
    "exposed_send": 5.0,
    "total": 500.0,
}


def test_stages_follow_one_another_and_those_within_others_lie_there() -> None:
    assert bars(TIMINGS) == [
        Bar("route", 0, 1),
        Bar("queue", 1, 2),
        Bar("prepare", 3, 4),
        Bar("allocate", 4, 3),
        Bar("compute", 7, 20),
        Bar("first_token", 27, 3),
        Bar("exposed_send", 27, 5),
    ]


def test_the_stages_in_turn_add_up_to_the_time_to_first_token() -> None:
    assert time_to_first_token_ms(TIMINGS) == 30.0


def test_every_stage_that_took_time_has_a_bar_as_long_as_its_share() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(waterfall(TIMINGS))
    lines = captured.get().splitlines()
    assert lines == [line.rstrip() for line in lines], "blanks at the end of a line"
    assert lines[1:3] == ["route          1.0  █", "queue          2.0   ███"]
    lengths = {
        line.split()[0]: line.count("█") for line in captured.get().splitlines()[1:] if line.strip()
    }
    assert lengths["compute"] == 28  # 20 of 32 ms on 44 columns
    assert min(lengths.values()) >= 1


def test_an_answer_without_timings_has_rows_without_bars() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(waterfall({}))
    assert "compute" in captured.get() and "█" not in captured.get()
