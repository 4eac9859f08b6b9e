"""A Prometheus of one test, with the shipped configuration and rules, in seconds for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"
EXECUTABLE = "prometheus"
SCRAPE_S = 0.5

SHORTENED = {
    "1m": "1s",
    "2m": "1s",
    "5m": "6s",
    "10m": "8s",
    "15m": "2s",
    "30m": "8s",
    "1h": "12s",
    "6h": "16s",
}
"""What a range or a `for` of the shipped rules is in a test. Nothing else of them is changed."""

_RANGE = re.compile(r"\[(\w+)\]")
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')
_START_S = 20.0


class Prometheus:
    """The API of a running one."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.began = time.time()

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of /api/v1. AssertionError with what it says of a wrong query."""
        url = f"http://{self._endpoint}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of a query, now."""
        found = self.get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def value(self, expression: str) -> float:
        """The sum of a query's values, 0 where there are none."""
        return sum(value for _, value in self.query(expression))

    def series(self, match: str) -> list[dict[str, str]]:
        """The labels of all series there have been."""
        found: list[dict[str, str]] = self.get(
            "series", **{"match[]": match, "start": f"{self.began - 60:f}"}
        )
        return found

    def fired(self) -> set[tuple[str, str]]:
        """Names of all alerts that have fired so far, with the instance they are about."""
        since = int(time.time() - self.began) + 60
        found = self.query(f'count_over_time(ALERTS{{alertstate="firing"}}[{since}s])')
        return {(about["alertname"], _instance(about)) for about, _ in found}

    def firing(self, alert: str) -> list[dict[str, Any]]:
        """Labels and annotations of an alert that fires now, once for each instance."""
        alerts = self.get("alerts")["alerts"]
        return [
            each
            for each in alerts
            if each["state"] == "firing" and each["labels"]["alertname"] == alert
        ]

    async def until(self, expression: str, limit_s: float = 30.0) -> None:
        """Wait until a query has a result. TimeoutError."""

        async def look() -> None:
            while not self.query(expression):  # noqa: ASYNC110 - a query tells nobody
                await asyncio.sleep(SCRAPE_S / 2)

        await asyncio.wait_for(look(), limit_s)

    async def until_fires(
        self, alert: str, instance: str = "", limit_s: float = 40.0
    ) -> dict[str, Any]:
        """The alert, of that instance if one is named, once it fires. TimeoutError."""

        async def look() -> dict[str, Any]:
            while True:
                for each in self.firing(alert):
                    if instance in ("", _instance(each["labels"])):
                        return each
                await asyncio.sleep(SCRAPE_S / 2)

        return await asyncio.wait_for(look(), limit_s)


def _instance(labels: Mapping[str, str]) -> str:
    return labels.get("otel_scope_pd_instance", labels.get("instance", ""))


@contextlib.contextmanager
def prometheus(folder: Path, metrics: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrapes `metrics`, host:port by name such as `prefill-0`, with the shipped configuration but
    for its targets and its times."""
    (folder / "alerts.yml").write_text(json.dumps(shortened_rules()), encoding="utf-8")
    (folder / "prometheus.yml").write_text(json.dumps(configuration(metrics)), encoding="utf-8")
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                EXECUTABLE,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                # How soon it takes up its targets; five seconds unless told.
                f"--scrape.discovery-reload-interval={SCRAPE_S * 1000:.0f}ms",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        running = Prometheus(_endpoint(process, log))
        _until_scraped(running, len(metrics))
        yield running
    finally:
        process.terminate()
        # It writes down what it has in memory, which on a busy disk may last.
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def configuration(metrics: Mapping[str, str]) -> dict[str, Any]:
    """The shipped one with these targets, each in the job of its role."""
    config: dict[str, Any] = yaml.safe_load((SHIPPED / "prometheus.yml").read_text("utf-8"))
    every = f"{SCRAPE_S * 1000:.0f}ms"
    config["global"] = {"scrape_interval": every, "evaluation_interval": every}
    for job in config["scrape_configs"]:
        role = job["job_name"].removeprefix("pd-grpc-")
        targets = [at for name, at in metrics.items() if name.partition("-")[0] == role]
        assert targets, f"{role}: nothing to scrape"
        job["static_configs"] = [{"targets": targets}]
    return config


def shortened_rules() -> dict[str, Any]:
    """The shipped rules with each `for` and each range of SHORTENED in place of its own."""
    rules: dict[str, Any] = yaml.safe_load((SHIPPED / "alerts.yml").read_text("utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = _RANGE.sub(lambda found: f"[{SHORTENED[found[1]]}]", rule["expr"])
            if "for" in rule:
                rule["for"] = SHORTENED[rule["for"]]
    return rules


def _endpoint(process: subprocess.Popen[bytes], log: Path) -> str:
    """host:port once it answers that it is ready."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        listens = _LISTENS.search(log.read_text("utf-8"))
        if listens and _ready(listens[1]):
            return listens[1]
        time.sleep(0.05)
    raise AssertionError(f"Prometheus does not start:\n{log.read_text('utf-8')}")


def _until_scraped(running: Prometheus, targets: int) -> None:
    """What happens before its first scrape it has not seen."""
    deadline = time.monotonic() + _START_S
    while running.value("count(up == 1)") < targets:
        assert time.monotonic() < deadline, running.query("up")
        time.sleep(0.1)


def _ready(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/-/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
