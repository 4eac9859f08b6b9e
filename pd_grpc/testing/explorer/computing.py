"""The engine of a P of the world: it writes tags and reads them, and its steps may go wrong."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pd_grpc.engine.base import Sampled
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.testing.explorer.kv import UNCUT, Cut, Tag, client_of, sampled, writer_of
from pd_grpc.testing.explorer.sending import SendingProcess
from pd_grpc.testing.explorer.wire import Interned


class ComputingProcess(SendingProcess):
    """What of a P runs steps, one at a time."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: PrefillConfig,
        fine: bool,
        known_as: tuple[str, int],
        cut: Cut = UNCUT,
    ) -> None:
        super().__init__(name, epoch, ids, config, fine, known_as, cut)
        self.run: act.RunStep | None = None

    def _take_run(self, run: act.RunStep) -> None:
        assert self.run is None, "two steps at once"
        self.run = run

    def _rows(self) -> tuple[tuple[str, bool], ...]:
        """See `Looks.rows`."""
        if self.run is None:
            return ()
        rows = zip(self.run.keys, self.run.chunks, strict=True)
        return tuple((client_of(key), chunk.sample is not None) for key, chunk in rows)

    def _raise(self) -> None:
        run, self.run = self.run, None
        assert run is not None
        self._feed(ev.StepFailed(run.step, "the engine raised"))

    def _step(self, spoiled: str = "") -> None:
        """The engine's step is over. No numbers came of the KV of the client `spoiled`."""
        assert self.run is not None
        if self._raises_over(self.run.keys):
            self._raise()
            return
        run, self.run = self.run, None
        results: list[Sampled | None] = []
        computed, spoilt = [], []
        for key, chunk in zip(run.keys, run.chunks, strict=True):
            for i, token in enumerate(chunk.token_ids):
                tag = Tag(*writer_of(key), chunk.start + i, token)
                self._store(chunk.block_table, tag)
            end = chunk.start + len(chunk.token_ids)
            computed.append((key, end))
            stored = self.memory.tokens(chunk.block_table, end, key)
            chosen = sampled(stored, client_of(key) == spoiled)
            results.append(None if chunk.sample is None else chosen)
            if client_of(key) == spoiled:
                spoilt.append(chunk.block_table)
        self.to_bulk.append(tuple(computed))
        self._feed(ev.StepDone(run.step, results))
        self._check_distrusted(spoilt)

    @abstractmethod
    def _feed(self, event: Any) -> None:
        """See `EngineProcess._feed`."""
