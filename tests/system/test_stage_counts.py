"""As many samples of each stage as requests, so that its mean and quantiles are a request's."""

from __future__ import annotations

import asyncio

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.telemetry import names
from tests.cluster import cluster
from tests.system.asking import ask, request
from tests.system.test_metrics import Read

REQUESTS = 6
STAGES = {
    "router": ("route",),
    "prefill": ("queue", "prepare", "compute", "send"),
    "decode": ("prefill", "allocate", "transfer", "first_token", "decode"),
}
MAYBE = ("allocate",)
"""Not of a request that D had room for at once."""


async def test_every_request_is_one_sample_of_each_stage_it_went_through() -> None:
    reader = InMemoryMetricReader()
    # D has room for two of them.
    async with (
        cluster(meters=MeterProvider([reader]), decode_settings={"num_blocks": 32}) as running,
        running.client() as stub,
    ):
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        replies = await asyncio.gather(
            *(ask(stub, request(list(range(3 + n, 163 + n)), sampling)) for n in range(REQUESTS))
        )
        await running.settled()
    read = Read(reader)
    for role, stages in STAGES.items():
        for stage in stages:
            number = read.count(names.METRIC_STAGE_DURATION, role=role, stage=stage)
            assert 0 < number <= REQUESTS if stage in MAYBE else number == REQUESTS, (role, stage)
    for stage in ("route", "queue", "prepare", "compute"):
        points = read.points(names.METRIC_STAGE_DURATION, stage=stage, role="prefill")
        points += read.points(names.METRIC_STAGE_DURATION, stage=stage, role="router")
        told_s = sum(seconds(getattr(reply.last.timings, stage)) for reply in replies)
        assert abs(sum(point.sum for point in points) - told_s) < 0.02 * REQUESTS, stage
