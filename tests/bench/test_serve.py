"""The benchmark of serving: its arithmetic on hand-made times, and a run of it in miniature."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.bench.serve.answers import TIE_NATS, Comparison, compare, parting
from pd_grpc.bench.serve.deployments import AGGREGATED, APART, WIDE, Run, running_deployments
from pd_grpc.bench.serve.figures import load_figures
from pd_grpc.bench.serve.handover import Handover
from pd_grpc.bench.serve.load import (
    NoFit,
    drawn,
    poisson_times,
    prompt_of,
    requests_of,
    scaled_lengths,
)
from pd_grpc.bench.serve.plot import plot_serving
from pd_grpc.bench.serve.run import FIGURES, ServeScope, bench_serve, faults_of
from pd_grpc.bench.serve.timing import (
    Heard,
    Message,
    Objective,
    message_gaps_s,
    saturated_rate,
    token_gaps_s,
)
from pd_grpc.bench.workload import Length


def heard(
    sent_s: float, *messages: tuple[float, int], fault: str = "", compute_ms: float = 0.0
) -> Heard:
    stages = dict.fromkeys(("route", "queue", "prepare", "first_token"), 0.0)
    stages |= {"allocate": 0.0, "exposed_send": 0.0, "total": 0.0, "compute": compute_ms}
    came = [Message(*message) for message in messages]
    return Heard("r", sent_s, came, fault=fault, stages_ms=stages)


ANSWER = heard(1.0, (1.5, 1), (1.6, 1), (1.9, 3))
"""TTFT 0.5 s; four tokens in 0.4 s, the last three of which came together."""


def test_an_answers_times_are_those_of_its_messages() -> None:
    assert ANSWER.ttft_s == pytest.approx(0.5)
    assert ANSWER.tpot_s == pytest.approx(0.1)
    assert message_gaps_s(ANSWER) == pytest.approx([0.1, 0.3])
    assert token_gaps_s(ANSWER) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert Heard.of_wire({"name": "r", "sent_s": 1.0, "messages": [[1.5, 1]]}) == Heard(
        "r", 1.0, [Message(1.5, 1)]
    )


def test_tokens_that_come_with_the_first_have_no_gap() -> None:
    answer = heard(0.0, (1.0, 2), (2.0, 1))
    assert answer.tpot_s == pytest.approx(0.5)
    assert token_gaps_s(answer) == pytest.approx([0.0, 1.0])
    assert sum(token_gaps_s(answer)) == pytest.approx(2 * (answer.tpot_s or 0))


def test_an_answer_of_one_token_has_no_time_per_token_and_none_no_first() -> None:
    assert heard(0.0, (1.0, 1)).tpot_s is None
    assert token_gaps_s(heard(0.0)) == [] and message_gaps_s(heard(0.0)) == []
    with pytest.raises(ValueError, match="no first token"):
        heard(0.0).ttft_s  # noqa: B018 - it is what raises


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        (Objective(0.5, 0.11), True),
        (Objective(0.49, 0.11), False),
        (Objective(0.5, 0.09), False),
    ],
)
def test_an_objective_wants_both(objective: Objective, met: bool) -> None:
    assert objective.met(heard(1.0, (1.5, 1), (1.7, 2))) is met


def test_goodput_counts_what_kept_the_objective_among_all_that_were_sent() -> None:
    late, failed = heard(2.0, (5.0, 1), (5.1, 1)), heard(3.0, (3.1, 1), fault="lost")
    warm = heard(0.0, (9.0, 1))
    run = Run(APART, [warm, ANSWER, late, failed], 4.0, {"decode-0": 3.0, "client": 1.0})
    figures = load_figures(run, warm_up=1, objective=Objective(2.0, 0.2))
    assert (figures["sent"], figures["completed"], figures["failed"]) == (3, 2, 1)
    assert figures["faults"] == ["lost"]
    # From the first that counts, at 1.0, to the last token, at 5.1.
    assert figures["seconds"] == pytest.approx(4.1)
    assert figures["goodput_share"] == pytest.approx(1 / 3)
    assert figures["goodput_per_s"] == pytest.approx(1 / 4.1)
    assert figures["tokens_per_s"] == pytest.approx(7 / 4.1)
    assert figures["tokens_per_message"] == pytest.approx(7 / 5)
    assert figures["ttft_ms"] == pytest.approx({"p50": 500, "p90": 3000, "p99": 3000})
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["message_gap_ms"] == pytest.approx({"p50": 100, "p90": 300, "p99": 300})
    assert figures["cores_busy"] == pytest.approx(1.0)
    assert figures["each"][-1] == "lost"


def test_a_load_of_which_nothing_came_has_no_times() -> None:
    figures = load_figures(Run(APART, [heard(0.0, fault="lost")], 1.0, {}), 0, Objective(1, 1))
    assert figures["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert figures["goodput_share"] == 0 and figures["goodput_per_s"] == 0


def test_the_saturated_rate_leaves_out_how_a_load_begins_and_runs_out() -> None:
    # Two at once; four a second while it is full, and a slow beginning and end.
    ends = [5.0, 6.0, 6.25, 6.5, 6.75, 7.0, 20.0, 30.0]
    assert saturated_rate(ends, at_once=2) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="too few"):
        saturated_rate(ends, at_once=4)


def test_lengths_are_those_of_the_trace_times_the_scale() -> None:
    whole, half = scaled_lengths(1.0, 1 << 20), scaled_lengths(0.5, 1 << 20)
    assert [round(0.5 * each.prompt) for each in whole] == [each.prompt for each in half]
    assert all(p + o <= 300 for p, o in scaled_lengths(0.25, 300))
    assert min(each.output for each in scaled_lengths(0.001, 300)) == 2
    with pytest.raises(NoFit, match="--scale 1"):
        scaled_lengths(1.0, 3)


def test_a_load_is_the_same_for_the_same_seed_and_offers_the_rate() -> None:
    times = poisson_times(50, 5.0, "1")
    assert times == sorted(poisson_times(50, 5.0, "1")) != poisson_times(50, 5.0, "2")
    assert times[0] >= 0 and times[-1] <= 10.0
    lengths = drawn([Length(3, 2), Length(5, 4)], 50, "1")
    requests = requests_of("x", times, lengths)
    assert requests == requests_of("x", times, drawn([Length(3, 2), Length(5, 4)], 50, "1"))
    assert [len(each.token_ids) for each in requests] == [each.prompt for each in lengths]
    assert prompt_of("x-1", 8) == prompt_of("x-1", 9)[:8] != prompt_of("x-2", 8)


def test_what_the_handover_adds_is_a_difference_within_a_round() -> None:
    def of(slow: float) -> dict[str, Heard]:
        return {
            AGGREGATED: heard(0.0, (slow, 1), compute_ms=900 * slow),
            WIDE: heard(0.0, (slow + 0.05, 1), compute_ms=900 * slow),
        }

    # The machine is slower in some rounds, and that makes no difference.
    found = Handover(1024, [of(1.0), of(3.0), of(1.0)]).figures()
    assert found["ttft_overhead_ms"] == pytest.approx(50)
    assert found["ttft_overhead_share"] == pytest.approx(50 / 900)
    assert found["handover"]["ttft_ms"][AGGREGATED] == pytest.approx(1000)
    assert found["handover"]["stages_ms"][WIDE]["client"] == pytest.approx(150)
    assert Handover(1024).figures()["ttft_overhead_ms"] is None


def test_answers_that_part_by_a_token_as_likely_are_a_tie_and_others_wrong() -> None:
    found = Comparison()
    found.judge("a", {7: -1.0, 8: -1.25}, (7, 8))
    assert (found.ties, found.wrong, found.widest_nats) == (1, [], 0.25)
    found.judge("b", {7: -1.0, 8: -1.0 - 2 * TIE_NATS}, (8, 7))
    found.judge("c", {7: -1.0}, (7, 9))
    found.judge("d", {}, (7, 9))
    assert [each.partition(":")[0] for each in found.wrong] == ["b", "c", "d"]
    assert found.compared == 4
    assert parting([1, 2, 3], [1, 2, 3]) is None and parting([1, 2, 3], [1, 5, 3]) == 1


FLAGS = ("--num-blocks", "256")


async def test_a_token_that_is_not_the_models_is_found_wrong() -> None:
    async with running_deployments([AGGREGATED], "sim", "smollm2", FLAGS) as deployments:
        requests = requests_of("w", [0.0] * 3, [Length(20, 6)] * 3)
        run = await deployments.open(AGGREGATED, requests, 30.0)
        assert [answer.fault for answer in run.answers] == [""] * 3
        right: Sequence[Heard] = run.answers
        ids = list(right[1].token_ids)
        ids[3] += 1
        other = [right[0], replace(right[1], token_ids=ids), replace(right[2], fault="lost")]
        found = Comparison()
        await compare(deployments, requests, right, other, found)
        assert (found.equal, found.ties, found.compared) == (1, 0, 2)
        assert found.wrong[0].startswith("w-1: ")
        # The aggregated one's own is found as well.
        await compare(deployments, requests, other, right, found)
        assert len(found.wrong) == 2


async def test_a_run_in_miniature_has_every_figure(tmp_path: Path) -> None:
    scope = ServeScope.of(
        True,
        engine="sim",
        scale=0.02,
        requests=6,
        saturating=12,
        at_once=4,
        loads=(0.02, 0.04),
        handover_rounds=1,
        handover_tokens=64,
        flags=FLAGS,
    )
    kept: list[dict[str, Any]] = []
    report = await bench_serve(scope, lambda text: None, kept.append)
    assert faults_of(report) == []
    assert [each["complete"] for each in kept] == [False] * 3 and report["complete"]
    assert all(report[name] is not None for name in FIGURES)
    modes = [(load["mode"], round(load["load"], 2)) for load in report["loads"]]
    first = [(AGGREGATED, 0.02), (APART, 0.02)]
    assert modes == [*first, (APART, 0.04), (WIDE, 0.04), (AGGREGATED, 0.04)]
    for load in report["loads"]:
        assert (load["sent"], load["completed"]) == (6, 6)
        assert 0 < load["token_gap_ms"]["p50"] <= load["message_gap_ms"]["p99"]
        assert set(load["cpu_s"]) >= {"router", "decode-0", "client"}
    assert report["answers_equal"] == report["answers_compared"] == 3 * (2 + 6)
    assert set(report["handover"]["ttft_ms"]) == {AGGREGATED, WIDE, APART}
    if importlib.util.find_spec("matplotlib") is not None:
        plot_serving(report, tmp_path / "serve.png")
        assert (tmp_path / "serve.png").stat().st_size > 0


def test_a_failed_request_or_a_wrong_answer_makes_a_run_worthless() -> None:
    report = {"faults": ["slow"], "loads": [{"faults": ["lost"]}], "wrong": ["x"]}
    assert faults_of(report) == ["failed: slow", "failed: lost", "wrong: x"]
