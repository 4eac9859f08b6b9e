from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

import pytest

from pd_grpc.bench.legs import BenchRequest
from pd_grpc.bench.processes import WorkerLost, WorkerProcess


@pytest.fixture
async def driver() -> AsyncIterator[WorkerProcess]:
    worker = await WorkerProcess.launch("driver")
    await worker.start(prefill=["127.0.0.1:1"], router="")
    yield worker
    await worker.stop()


def far_off() -> list[dict[str, object]]:
    request = BenchRequest("r-1", 1, 1, (("d0", "127.0.0.1:1"),))
    return [{"at_s": 3600.0, "request": asdict(request)}]


async def test_a_worker_answers_each_command(driver: WorkerProcess) -> None:
    assert await driver.do("open", arrivals=[], deadline_s=1.0) == []
    assert await driver.do("open", arrivals=[], deadline_s=1.0) == []


async def test_a_busy_worker_ends_when_its_parent_lets_go_of_it(driver: WorkerProcess) -> None:
    asking = asyncio.create_task(driver.do("open", arrivals=far_off(), deadline_s=1.0))
    await asyncio.wait([asking], timeout=0.2)
    assert not asking.done()
    # Raises unless the process ends by itself.
    await driver.stop()
    with pytest.raises(WorkerLost, match="driver has ended"):
        await asking


async def test_a_worker_that_does_not_answer_in_time_is_lost(driver: WorkerProcess) -> None:
    with pytest.raises(WorkerLost, match=r"driver did not answer within 0\.2 s"):
        await driver.do("open", 0.2, arrivals=far_off(), deadline_s=1.0)


async def test_a_worker_that_fails_is_lost(driver: WorkerProcess) -> None:
    with pytest.raises(WorkerLost, match="driver has ended"):
        await driver.do("juggle")
