"""The one thread that an engine is called from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pd_grpc.engine.base import EngineFault
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")


class EngineThread:
    """Runs steps one after another, off the loop that asks for them."""

    def __init__(self, log: InstanceLog) -> None:
        self._log = log
        self._executor = ThreadPoolExecutor(1, "pd-engine")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. EngineFault for whatever it raises: a model may raise anything, and
        that must fail the requests of the step and nothing else."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, work)
        except EngineFault:
            raise
        except Exception as error:
            # What an engine says tells why it cannot go on. Its numbers may be of a prompt.
            words = _NUMBER.sub("#", str(error))
            self._log.note(Event.ENGINE_RAISED, "the engine raised: %s", words, error=error)
            raise EngineFault(f"{type(error).__name__} in the engine") from error

    async def stop(self) -> None:
        """Wait for what runs, and end the thread."""
        await asyncio.to_thread(self._executor.shutdown)
