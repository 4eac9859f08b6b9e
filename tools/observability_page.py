"""The parts of docs/observability.md: the metrics of the code, and the worked cases from a run of
`tools.worked_cases` that is kept beside the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pd_grpc.telemetry import names
from pd_grpc.telemetry.instruments import CATALOG, Instrument
from tools.marked_parts import Parts, table
from tools.proto_source import ROOT
from tools.worked_cases import CASES, KEPT

MEANINGS: Mapping[str, tuple[str, str]] = {
    names.METRIC_STAGE_DURATION: (
        "the stage that rises is where requests wait: `prepare` for D's blocks, `queue` for P's "
        "engine, `send` and `transfer` for the link",
        "with fewer requests than before: they fail earlier, see `pd.refusals`",
    ),
    names.METRIC_BLOCKS: (
        "`free` low: the pool is the limit; `quarantined`: blocks that a step of the engine, "
        "or a sender not seen to stop, may still touch",
        "`free` that does not come back when nothing runs: a leak, please report it",
    ),
    names.METRIC_PREFIX_LOOKUP_TOKENS: (
        "its rate follows the prompts that were granted or computed",
        "0 while prompts come: `--prefix-cache 0`, or prompts shorter than a block",
    ),
    names.METRIC_PREFIX_HIT_TOKENS: (
        "its rate over that of the lookups is the share that was spared",
        "prompts no longer begin alike, or the pool is too full to keep what nobody holds",
    ),
    names.METRIC_TRANSFER_BYTES: (
        "its rate is the KV that crosses, and follows the prompts",
        "its rate falls while prompts come: the link, or P is not granted blocks",
    ),
    names.METRIC_TRANSFER_DURATION: (
        "the link is slow, or chunks of prefill are far apart",
        "a faster link, or shorter prompts",
    ),
    names.METRIC_REFUSALS: (
        "look the reason up in [failures.md](failures.md)",
        "of a reason that was steady: its cause is gone",
    ),
    names.METRIC_LEASE_EXPIRED: (
        "P and D lost sight of each other: a dead or frozen P, a cut link",
        "it only grows; a rate of 0 is healthy",
    ),
    names.METRIC_LATE_EVENTS: (
        "cancels, deadlines and releases cross what they end; harmless, and many with many cancels",
        "it only grows",
    ),
    names.METRIC_DECISION: ("follows the requests", "requests do not reach the router"),
    names.METRIC_SECOND_TOKEN_GAP: (
        "KV arrives after the first token (exposed send), or D's steps are long",
        "sending overlaps compute better",
    ),
    names.METRIC_WASTED_TOKENS: (
        "P computes for requests that then fail or are cancelled: deadlines too short, a D that "
        "dies",
        "it only grows; its rate should be small beside the rate of prompt tokens",
    ),
    names.METRIC_QUEUE_TOKENS: (
        "on P: more is asked than P computes or D grants; on D: its pool is full",
        "the backlog is worked off",
    ),
    names.METRIC_PREPARE_IN_FLIGHT: (
        "at the window of a D: that D answers late, or has no room",
        "few wait for that D",
    ),
    names.METRIC_PREPARE_WAITING: (
        "requests queue behind a D's window or back-off",
        "the queue empties",
    ),
    names.METRIC_PREPARE_BREAKER_OPEN: (
        "that D cannot be had and is asked nothing but probes",
        "it answers again",
    ),
    names.METRIC_PREPARE_READY: (
        "D grants faster than P computes; bounded by `--prepare-ahead`",
        "at 0 with a queue: P's engine waits for grants",
    ),
    names.METRIC_PREPARE_WAIT: (
        "D is full or slow to answer",
        "D has room",
    ),
    names.METRIC_ROUTER_RETRIES: (
        "instances fail before the first token; the reason says how",
        "it only grows",
    ),
    names.METRIC_ROUTER_CONTINUATIONS: (
        "instances fail in mid-answer, and the client does not see it",
        "it only grows",
    ),
    names.METRIC_ROUTER_RETRIES_REFUSED: (
        "more fails than is retried: clients see these failures",
        "it only grows; a rate of 0 is healthy",
    ),
    names.METRIC_ROUTER_RETRY_BUDGET: (
        "answers pay it back",
        "at 0 nothing is retried: find out what fails",
    ),
    names.METRIC_TTFT: (
        "see which stage has risen",
        "healthy, if requests do not fail instead",
    ),
    names.METRIC_TPOT: (
        "D's batches are larger, or its engine is slower",
        "smaller batches, or fewer requests",
    ),
    names.METRIC_REQUEST_DURATION: (
        "longer answers, or one of the two above",
        "shorter answers, or failures: see `error.type`",
    ),
    names.METRIC_RPC_SERVER_DURATION: (
        "streams last as long as their requests; of `Allocate` it is D's wait for blocks",
        "see `rpc.response.status_code`",
    ),
    names.METRIC_RPC_CLIENT_DURATION: (
        "more than the same method of the server: the network, or a busy event loop",
        "see `rpc.response.status_code`",
    ),
}
"""What each metric rising and falling means to an operator."""


def metrics() -> str:
    """Every metric of the catalog."""
    rows = [
        (f"`{each.name}`", _kind(each), each.description, _labels(each), *MEANINGS[each.name])
        for each in CATALOG.values()
    ]
    return table("metric | unit | what | labels | rising | falling", rows)


def _kind(each: Instrument) -> str:
    return f"{each.unit}, histogram" if each.bounds else each.unit


def _labels(each: Instrument) -> str:
    return ", ".join(f"`{label}`" for label in each.labels)


def _kept(case: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))[case]
    return found


def trace_of(case: str) -> Callable[[], str]:
    """What `pd-grpc trace` showed of a case."""
    return lambda: "\n".join(("```text", *_kept(case)["trace"], "```"))


def metrics_of(case: str) -> Callable[[], str]:
    """What Prometheus was answered after a case."""

    def make() -> str:
        rows = [
            (f"`{name}`", labels, number, mean)
            for name, labels, number, mean in _kept(case)["metrics"]
        ]
        return table("histogram | labels | number | mean, s", rows)

    return make


def setting_of(case: str) -> Callable[[], str]:
    """The system and the load of a case."""

    def make() -> str:
        kept = _kept(case)
        load = kept["load"]
        flags = " ".join(kept["flags"])
        link = kept["link_bytes_per_s"]
        way = f", the KV over a link of {link / 1e6:g} MB/s" if link else ""
        return (
            f"`pd-grpc up --engine sim {flags}`{way}; {load['requests']} requests of "
            f"{load['prompt']} prompt tokens and {load['answer']} new ones, {load['at_once']} at "
            f"once; {kept['failed']} failed."
        )

    return make


COST = ROOT / "docs" / "telemetry.json"


def cost() -> str:
    """What a run of `pd-grpc bench telemetry` showed that is kept beside the page."""
    run: Mapping[str, Any] = json.loads(COST.read_text(encoding="utf-8"))
    rows = []
    for variant in ("sampled", "on", "local", "same"):
        cells = [f"`{variant}`", run["compares"][variant]["description"]]
        for of in ("throughput_ratio", "server_cpu_ratio"):
            low, high = run[f"{of}_{variant}_interval"]
            cells.append(f"{run[f'{of}_{variant}']:.3f} ({low:.3f} to {high:.3f})")
        rows.append(tuple(cells))
    before, after = (run["load_average"][when][0] for when in ("before", "after"))
    spans, lost = run["spans_per_request"], run["spans_lost"]
    cores = run["machine"]["cores"]
    heads = "variant | what | throughput over `off` | CPU of `off` over it"
    return "\n".join(
        (
            table(heads, rows),
            "",
            f"{spans:.0f} spans a request, {lost} lost; {cores} cores, load {before:.1f} before "
            f"and {after:.1f} after.",
        )
    )


_MAKERS = {"setting": setting_of, "trace": trace_of, "metrics": metrics_of}

PARTS: Parts = {
    "metrics": metrics,
    "cost": cost,
    **{
        f"{case}_{part}": make(case)
        for case in CASES
        for part, make in _MAKERS.items()
        if CASES[case].metrics or part != "metrics"
    },
}
