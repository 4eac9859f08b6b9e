"""A real Prometheus scrapes the servers of a real `pd-grpc up`, with the shipped configuration and
dashboard. The shipped rules keep their expressions and thresholds; their times are `SHORTENED`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_grpc.client import AsyncClient, AsyncGeneration, Fault
from pd_grpc.protocol.faults import Reason
from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import CATALOG, Instrument
from tests.backends.prometheus import SHIPPED, Prometheus, prometheus
from tests.cli.test_up import Up
from tests.house.pages import anchors
from tests.router.test_end_to_end import until_computing

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "pd-grpc.json"

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.longest,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not installed (Debian's package `prometheus`)",
    ),
]


@dataclass
class Scraped:
    """A system, and the Prometheus that scrapes it."""

    up: Up
    prometheus: Prometheus

    @property
    def router(self) -> str:
        return self.up.endpoints()["router"]


@contextlib.contextmanager
def scraped(folder: Path, *flags: str, **environ: str) -> Iterator[Scraped]:
    logs = folder / "logs"
    logs.mkdir()
    up = Up(logs, "--prometheus", "127.0.0.1:0", *flags, PD_DRAIN_S="0.5", **environ)
    try:
        with prometheus(folder, up.metrics()) as running:
            yield Scraped(up, running)
    finally:
        up.process.send_signal(signal.SIGTERM)
        up.wait()


def ask(client: AsyncClient, prompt: int, max_tokens: int, seed: int = 0) -> AsyncGeneration:
    return client.generate(
        token_ids=[3 + seed % 1000, *[5] * (prompt - 1)],
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
    )


async def load(router: str, requests: int, at_once: int = 8) -> None:
    """Requests of one kind; each must be answered."""
    waiting = iter(range(requests))

    async def client_of_many(client: AsyncClient) -> None:
        for seed in waiting:
            await ask(client, 200, 6, seed).collect()

    async with AsyncClient(router) as client:
        await asyncio.gather(*(client_of_many(client) for _ in range(at_once)))


@contextlib.asynccontextmanager
async def going_on(
    router: str, at_once: int, prompt: int, max_tokens: int, timeout_s: float = 60.0
) -> AsyncIterator[list[Reason | None]]:
    """Clients that ask again and again meanwhile; how each request ended, None for an answer."""
    ends: list[Reason | None] = []

    async def insist(client: AsyncClient) -> None:
        while True:
            try:
                await ask(client, prompt, max_tokens).collect()
                ends.append(None)
            except Fault as fault:
                ends.append(fault.reason)

    async with AsyncClient(router) as client:
        tasks = [asyncio.create_task(insist(client)) for _ in range(at_once)]
        try:
            yield ends
        finally:
            for task in tasks:
                task.cancel()
            over = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in over), over


# --- a day without a fault ------------------------------------------------------------------------

REQUESTS = 60


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Two D, a P and a router that have answered for some seconds."""
    folder = tmp_path_factory.mktemp("healthy")
    environ = {"PD_SIM_TIME_SCALE": "5", "PD_NUM_BLOCKS": "512"}
    with scraped(folder, "--decode", "2", **environ) as running:
        # Of a series whose first sample is not 0 Prometheus sees what comes after it.
        for _ in range(2):
            asyncio.run(load(running.router, REQUESTS))
            asyncio.run(running.prometheus.until(_answered(running.prometheus)))
        yield running


def _answered(server: Prometheus) -> str:
    """Holds once two more scrapes have been kept."""
    return f"min(timestamp(up)) > {time.time() + 0.5:f}"


ON_A_GOOD_DAY = [each for each in CATALOG.values() if each.name != names.METRIC_WASTED_TOKENS]
"""What is computed for nobody counts by the reason of a fault: tests/system/test_metrics.py."""


def exported(about: Instrument) -> tuple[str, str]:
    """The name and the type of a metric in Prometheus, by OpenTelemetry's rules, without what a
    counter or a histogram adds."""
    name = about.name.replace(".", "_")
    unit = {"s": "seconds", "By": "bytes"}.get(about.unit, "")
    if unit and not name.endswith(unit):
        name = f"{name}_{unit}"
    return name, "histogram" if about.bounds else ""


@pytest.mark.parametrize("about", ON_A_GOOD_DAY, ids=lambda about: about.name)
def test_every_metric_is_there_with_its_description_and_its_labels(
    healthy: Scraped, about: Instrument
) -> None:
    name, kind = exported(about)
    series = healthy.prometheus.series(f'{{__name__=~"{name}(_total|_count)?"}}')
    assert series, f"no series of {name}"
    allowed = {label.replace(".", "_") for label in about.labels}
    for labels in series:
        own = {
            label for label in labels if not re.match("__name__|job|instance|otel_scope_", label)
        }
        assert own <= allowed, name
        assert labels["otel_scope_pd_instance"] in healthy.up.metrics()
    told = healthy.prometheus.get("metadata")
    (entry,) = told.get(name) or told[f"{name}_total"]
    assert entry["help"] == about.description
    if kind:
        assert entry["type"] == kind
        bounds = {float(labels["le"]) for labels in healthy.prometheus.series(f"{name}_bucket")} - {
            float("inf")
        }
        assert bounds == set(about.bounds)
    else:
        total = any(labels["__name__"].endswith("_total") for labels in series)
        assert entry["type"] == ("counter" if total else "gauge")


def test_the_states_of_the_blocks_sum_to_the_pool(healthy: Scraped) -> None:
    sums = healthy.prometheus.query("sum by (otel_scope_pd_instance) (pd_blocks)")
    assert {labels["otel_scope_pd_instance"]: blocks for labels, blocks in sums} == {
        "prefill-0": 512,
        "decode-0": 512,
        "decode-1": 512,
    }


def test_counters_say_how_many_requests_there_were(healthy: Scraped) -> None:
    count = healthy.prometheus.value("gen_ai_server_request_duration_seconds_count")
    assert count >= 2 * REQUESTS and count % REQUESTS == 0
    assert healthy.prometheus.value("gen_ai_server_time_to_first_token_seconds_count") == count
    verified = {
        role: healthy.prometheus.value(f'pd_transfer_bytes_total{{role="{role}"}}')
        for role in ("prefill", "decode")
    }
    assert verified["prefill"] == verified["decode"] > 0


def test_more_requests_make_no_more_series(healthy: Scraped) -> None:
    """Words that cross may come in another order for once; a label of a request would add with each
    load."""
    ours = '{__name__=~"pd_.*|gen_ai_.*|rpc_.*"}'
    counts = [len(healthy.prometheus.series(ours))]
    for _ in range(4):
        asyncio.run(load(healthy.router, REQUESTS))
        asyncio.run(healthy.prometheus.until(_answered(healthy.prometheus)))
        counts.append(len(healthy.prometheus.series(ours)))
        if counts[-1] == counts[-2]:
            break
    assert counts[-1] == counts[-2], counts


# --- the dashboard --------------------------------------------------------------------------------


def _dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return dashboard


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


VARIABLES = {"$__rate_interval": "10s", "$role": ".*", "$instance": ".*"}


@pytest.mark.parametrize("panel", _panels(), ids=lambda panel: panel["title"])
def test_every_query_of_the_dashboard_has_data(healthy: Scraped, panel: dict[str, Any]) -> None:
    """But those that a panel explains to be empty on a good day."""
    asyncio.run(healthy.prometheus.until("pd:ttft_slow:ratio_rate1h >= 0"))
    empty = 0
    for target in panel["targets"]:
        expression = target["expr"]
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression
        numbers = f"(({expression}) >= -Inf)"  # 0 divided by 0 is none
        found = healthy.prometheus.query(f"count_over_time({numbers}[10m:1s])")
        empty += not found
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for about, _ in found:
            assert labels <= set(about), "its legend names labels that it has not"
    if "Empty while " not in panel["description"]:
        assert empty == 0, panel["title"]


def test_the_variables_of_the_dashboard_list_roles_and_instances(healthy: Scraped) -> None:
    found = {}
    for variable in _dashboard()["templating"]["list"][1:]:
        metric, label = re.fullmatch(
            r"label_values\((.*), (\w+)\)", variable["definition"]
        ).groups()  # type: ignore[union-attr]
        series = healthy.prometheus.series(metric.replace("$role", ".*"))
        found[variable["name"]] = {labels[label] for labels in series}
    assert found == {
        "role": {"router", "prefill", "decode"},
        "instance": {"router", "prefill-0", "decode-0", "decode-1"},
    }


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """What its schema asks for and can be looked at without it."""
    dashboard = _dashboard()
    assert dashboard["schemaVersion"] >= 36 and dashboard["id"] is None and dashboard["uid"]
    everything = dashboard["panels"]
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids)
    covered: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & covered, f"{panel['title']} lies over another"
        covered |= cells
    for panel in _panels():
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["description"].endswith(".")
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    kinds = [variable["type"] for variable in dashboard["templating"]["list"]]
    assert kinds == ["datasource", "query", "query"]


UNITS = {"s", "short", "percentunit", "reqps", "ops", "Bps"}
"""Ids of Grafana's units that the dashboard uses."""


# --- the rules ------------------------------------------------------------------------------------


def test_promtool_finds_the_rules_right_and_their_cases_hold() -> None:
    for words in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run(
            ["promtool", *words], cwd=SHIPPED, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do_and_has_a_case() -> None:
    rules = yaml.safe_load((SHIPPED / "alerts.yml").read_text("utf-8"))
    cases = (SHIPPED / "alerts_test.yml").read_text("utf-8")
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 10
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        page, _, section = alert["annotations"]["runbook"].partition("#")
        assert section in anchors((ROOT / page).read_text("utf-8")), alert["annotations"]["runbook"]
        assert f'alertname="{alert["alert"]}"' in cases


def test_no_alert_fires_on_a_good_day(healthy: Scraped) -> None:
    asyncio.run(load(healthy.router, REQUESTS))
    asyncio.run(healthy.prometheus.until(_answered(healthy.prometheus)))
    assert healthy.prometheus.fired() == set()
    evaluated = healthy.prometheus.get("rules", type="alert")["groups"]
    rules = [rule for group in evaluated for rule in group["rules"]]
    assert len(rules) > 10
    for rule in rules:
        assert rule["health"] == "ok", rule


async def test_first_tokens_over_their_objective_fire(tmp_path: Path) -> None:
    """Planted: an engine that takes three seconds for a step."""
    with scraped(tmp_path, PD_SIM_TIME_SCALE="500") as running:
        async with going_on(running.router, at_once=8, prompt=30, max_tokens=1):
            far = await running.prometheus.until_fires("PdGrpcTtftFarOverObjective")
            await running.prometheus.until_fires("PdGrpcTtftOverObjective")
    assert far["annotations"]["summary"] == "100% of first tokens come too late"


async def test_a_decode_that_refuses_fires(tmp_path: Path) -> None:
    """Planted: room for one request, and a queue of one."""
    settings = {"PD_NUM_BLOCKS": "16", "PD_ALLOCATE_QUEUE": "1", "PD_SIM_TIME_SCALE": "20"}
    with scraped(tmp_path, **settings) as running:
        async with going_on(running.router, at_once=12, prompt=150, max_tokens=60) as ends:
            fired = await running.prometheus.until_fires("PdGrpcDecodeRefuses", "decode-0")
    assert fired["labels"]["reason"] == "QUEUE_FULL"
    assert fired["annotations"]["summary"] == "decode-0 refuses with QUEUE_FULL"
    assert Reason.QUEUE_FULL in ends


async def test_leases_that_expire_fire(tmp_path: Path) -> None:
    """Planted: a P that is frozen while D holds blocks for it. With the default times its session
    would be given up a little before its leases."""
    settings = {"PD_HEARTBEAT_S": "3", "PD_LEASE_S": "4", "PD_GRACE_S": "5"}
    slow = {"PD_SIM_TIME_SCALE": "100", "PD_CHUNK_TOKENS": "16"}
    with scraped(tmp_path, **settings, **slow) as running:
        prefill = running.up.child("prefill-0").pid
        async with AsyncClient(running.router) as client:
            async with until_computing(running.up.endpoints()["prefill-0"]):
                reading = asyncio.create_task(ask(client, 300, 10).collect())
            os.kill(prefill, signal.SIGSTOP)
            try:
                fired = await running.prometheus.until_fires("PdGrpcLeasesExpire", "decode-0")
                await running.prometheus.until_fires("PdGrpcInstanceDown")
            finally:
                os.kill(prefill, signal.SIGCONT)
            (ended,) = await asyncio.gather(reading, return_exceptions=True)
    assert fired["labels"]["side"] == "decode"
    assert isinstance(ended, Fault), ended


async def test_blocks_that_stay_quarantined_fire(tmp_path: Path) -> None:
    """Planted: steps of several seconds, and a client that leaves in the middle of one; first on P,
    then on D."""
    with scraped(tmp_path, PD_SIM_TIME_SCALE="1500") as running:
        async with AsyncClient(running.router) as client:
            async with until_computing(running.up.endpoints()["prefill-0"]):
                reading = asyncio.create_task(ask(client, 100, 10).collect())
            reading.cancel()
            fired = await running.prometheus.until_fires("PdGrpcBlocksQuarantined", "prefill-0")
            assert fired["annotations"]["summary"] == "prefill-0 cannot reuse 7 blocks"
            async with ask(client, 100, 10) as generation:
                await anext(generation)
                await running.prometheus.until('pd_blocks{role="decode", state="decoding"} > 0')
            await running.prometheus.until_fires("PdGrpcBlocksQuarantined", "decode-0")
            # Given back when the steps are over.
            await running.prometheus.until('sum(pd_blocks{state="quarantined"}) == 0')
