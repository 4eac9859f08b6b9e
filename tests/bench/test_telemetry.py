"""The benchmark of telemetry counts what it says, over servers as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytest.importorskip("psutil")

from pd_grpc.bench.processes import WorkerLost
from pd_grpc.bench.telemetry import (
    TARGETS,
    WORKLOADS,
    TelemetryScope,
    Workload,
    faults_of,
    lost_spans,
    order,
    workload_figures,
)
from pd_grpc.bench.telemetry_cost import Encoding, span_costs, ways
from pd_grpc.bench.telemetry_sink import count_spans
from pd_grpc.bench.telemetry_systems import (
    CLIENT,
    ENGINE,
    SERVERS,
    SINK,
    VARIANTS,
    Leg,
    Load,
    running_systems,
)
from pd_grpc.bench.workload import Length
from pd_grpc.protocol.config import TelemetryConfig
from pd_grpc.telemetry import names
from tests.cli.running import pd_grpc

WORKLOAD = Workload("a few", 64, 8, requests=4, at_once=2, time_scale=0.0, rounds=2, together=1)


def leg(variant: str, rate: float, cpu_s: float = 1.0, right: int = 4, **spans: Any) -> Leg:
    counted = {"spans": 0, "by_name": {}, "traces": 0, "spans_of_a_trace": 0, "missing": 0}
    whole = {**counted, "span_bytes": 0, **spans}
    cpu = dict.fromkeys((*SERVERS, SINK, CLIENT), cpu_s)
    wrong = ["nothing came"] * (4 - right)
    return Leg(variant, rate, right, wrong, 2.0, cpu, whole)


def a_round(off: float, **rates: float) -> list[Leg]:
    return [
        leg("off", off),
        *(leg(name, rates.get(name, off)) for name in VARIANTS if name != "off"),
    ]


def test_a_ratio_is_made_within_a_round_and_the_median_of_rounds_counts() -> None:
    rounds = [a_round(100, on=90), a_round(50, on=48), a_round(10, on=9.3)]
    ratio = workload_figures(WORKLOAD, rounds, rounds)["throughput_ratio"]["on"]
    assert ratio["rounds"] == pytest.approx([0.9, 0.96, 0.93])
    assert ratio["median"] == pytest.approx(0.93)


def test_cpu_is_that_of_a_right_answer() -> None:
    rounds = [[leg(name, 1, cpu_s=0.5 if name == "on" else 0.4) for name in VARIANTS]]
    figures = workload_figures(WORKLOAD, [a_round(1)], rounds)
    assert figures["cpu_ms_per_request"]["on"]["decode"] == pytest.approx(125)
    assert figures["server_cpu_ratio"]["on"]["median"] == pytest.approx(0.8)
    assert figures["busiest_cpu_ratio"]["on"] == pytest.approx(0.8)


def test_a_round_whose_requests_went_wrong_makes_no_ratio_and_is_told_of() -> None:
    bad = [leg("off", 0, right=0) if each.variant == "off" else each for each in a_round(1)]
    figures = workload_figures(WORKLOAD, [bad, a_round(10, on=5)], [a_round(1)])
    assert figures["throughput_ratio"]["on"]["rounds"] == [0.5]
    report = {"wrong_answers": figures["wrong_answers"], "workloads": {"a": figures}}
    assert faults_of(report) == ["4 requests were not answered as they should be: nothing came"]


def test_spans_that_a_trace_lacks_and_those_of_traces_that_never_came_are_lost() -> None:
    assert lost_spans(leg("on", 1, traces=4, spans_of_a_trace=20, missing=0)) == 0
    assert lost_spans(leg("on", 1, traces=3, spans_of_a_trace=20, missing=2)) == 22


def test_each_variant_comes_first_and_none_always_follows_the_same() -> None:
    variants = list(VARIANTS)
    orders = [order(variants, number) for number in range(2 * len(variants))]
    assert all(sorted(each) == sorted(variants) for each in orders)
    assert [each[0] for each in orders[: len(variants)]] == variants
    before = {each[each.index("on") - 1] for each in orders if each[0] != "on"}
    assert len(before) > 1


def exports(traces: Sequence[int], root: str = "pd.request") -> list[bytes]:
    """One export for each trace, with so many spans of a request and one step of an engine."""
    found = []
    for spans in traces:
        exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        with tracer.start_as_current_span(root):
            for _ in range(spans - 1):
                tracer.start_span("pd.queue").end()
        tracer.start_span("pd.step").end()
        found.append(encode_spans(exporter.get_finished_spans()).SerializeToString())
    return found


def test_a_collector_counts_spans_by_name_and_what_a_trace_lacks() -> None:
    counted = count_spans(exports([5] * 9 + [3]))
    assert counted["spans"] == 9 * 5 + 3 + 10
    assert counted["by_name"]["pd.queue"] == 9 * 4 + 2 and counted["by_name"]["pd.step"] == 10
    assert (counted["traces"], counted["spans_of_a_trace"], counted["missing"]) == (10, 5, 2)


def test_the_end_of_a_trace_whose_request_came_before_is_no_trace_and_lacks_nothing() -> None:
    counted = count_spans(exports([5] * 3) + exports([1], root="pd_grpc.v1.DecodeService/Decode"))
    assert counted["spans"] == 3 * 5 + 1 + 4
    assert (counted["traces"], counted["spans_of_a_trace"], counted["missing"]) == (3, 5, 0)


def test_nothing_is_counted_of_nothing() -> None:
    assert count_spans([])["spans"] == count_spans([])["missing"] == 0


def test_each_way_of_a_span_makes_of_it_what_its_name_says() -> None:
    exporter = InMemorySpanExporter()
    recording, kept, exported = set(), set(), set()
    for name, tracing in ways(exporter).items():
        span = tracing.start("pd.test", attributes={names.ATTR_TRANSFER_ID: "t-1"})
        if span.is_recording():
            recording.add(name)
        tracing.end(span)
        if tracing.recent.find("t-1"):
            kept.add(name)
        if exporter.get_finished_spans():
            exported.add(name)
            exporter.clear()
    assert recording == {"recorded_by_sdk", "recorded", "kept", "encoded"}
    assert (kept, exported) == ({"kept"}, {"encoded"})


def test_spans_are_encoded_batch_by_batch() -> None:
    encoding = Encoding()
    tracing = ways(encoding)["encoded"]
    for _ in range(Encoding.BATCH):
        assert encoding.encoded_bytes == 0
        tracing.end(tracing.start("pd.test"))
    assert encoding.encoded_bytes > Encoding.BATCH


def test_a_span_has_a_cost_in_each_way() -> None:
    costs = span_costs(spans=400)
    assert costs.keys() == ways(Encoding()).keys()
    assert all(cost > 0 for cost in costs.values())


def test_a_quick_run_has_every_workload_and_less_of_each() -> None:
    whole, quick = TelemetryScope.of(False), TelemetryScope.of(True)
    assert whole.workloads.keys() == quick.workloads.keys() == WORKLOADS.keys()
    for name, workload in quick.workloads.items():
        assert workload.requests > workload.at_once and workload.rounds < WORKLOADS[name].rounds


def test_what_a_server_keeps_by_default_is_what_is_measured() -> None:
    kept = TelemetryConfig().traces_kept
    assert kept > 0
    assert {
        name: v.traces_kept for name, v in VARIANTS.items() if v.otlp or name == "local"
    } == dict.fromkeys(("local", "sampled", "on"), kept)
    off, same = VARIANTS["off"], VARIANTS["same"]
    assert off.traces_kept == 0 and not off.otlp
    assert replace(same, description=off.description) == off
    assert {target.figure for target in TARGETS} == {
        "throughput_ratio_sampled",
        "throughput_ratio_on",
    }


async def test_every_request_leaves_its_spans_at_the_collector_or_none() -> None:
    variants = {name: VARIANTS[name] for name in ("off", "on")}
    load = Load([Length(40, 6)] * 8, at_once=3, limit_s=30.0)
    async with running_systems(variants, {**ENGINE, "sim_time_scale": 0.0}) as systems:
        await systems.prepare("test", load)
        off, on = await systems.run("off", load), await systems.run("on", load)
        await systems.prepare("together", load)
        together = await systems.run_together(load)
    assert [leg.variant for leg in together] == ["off", "on"]
    for each in (off, on, *together):
        assert (each.right, each.wrong) == (8, [])
        assert each.rate > 0 and each.wall_s > 0
        assert set(each.cpu_s) == {*SERVERS, SINK, CLIENT}
    assert off.spans["spans"] == together[0].spans["spans"] == 0
    for each in (on, together[1]):
        assert each.spans["by_name"]["pd.request"] == each.spans["by_name"]["pd.decode"] == 8
        assert each.spans["traces"] == 8 and lost_spans(each) == 0


async def test_an_answer_that_is_not_what_the_rule_of_sim_says_is_wrong() -> None:
    settings = {**ENGINE, "sim_time_scale": 0.0}
    # The client takes the engine for one of another vocabulary, and so expects other tokens.
    with pytest.raises(WorkerLost, match="not the tokens that it should have"):
        async with running_systems(
            {"off": VARIANTS["off"]}, settings, client_settings={**settings, "sim_vocab": 31_999}
        ):
            raise AssertionError("the warm-up has to fail")


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = pd_grpc("bench", "telemetry", "--quick", "--json", str(tmp_path / "absent" / "f.json"))
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
