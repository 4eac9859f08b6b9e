"""The thread that moves KV stands back, and no other does."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.receiver import Receiver
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.niceness import MOST, stand_back
from tests.decode.receiver_shard import LAYOUT

linux = pytest.mark.skipif(sys.platform != "linux", reason="only there threads have a niceness")


def niceness() -> dict[int, int]:
    """Of every thread of this process, by its id."""
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return {task: os.getpriority(os.PRIO_PROCESS, task) for task in tasks}


@linux
@pytest.mark.parametrize(("nice", "found"), [(0, 0), (7, 7), (99, MOST)])
def test_a_thread_stands_back_behind_its_process(nice: int, found: int) -> None:
    told = []

    def stand() -> None:
        stand_back(nice)
        told.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=stand)
    thread.start()
    thread.join()
    assert told == [min(MOST, own + found)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@linux
async def test_only_the_bulk_thread_of_a_d_is_nicer_than_the_others() -> None:
    config = DecodeConfig(bulk_nice=3)
    memory = HostKvMemory(bytearray(LAYOUT.block_bytes), LAYOUT)
    bulk = BulkServer(config, Receiver(config, LAYOUT, memory, 1), SystemClock())
    await asyncio.to_thread(bulk.start)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        (thread,) = (t.native_id for t in threading.enumerate() if t.name.startswith("pd-bulk"))
        assert {t: n for t, n in niceness().items() if n != own} == {thread: own + 3}
    finally:
        await asyncio.to_thread(bulk.stop)
