"""The engine of a D of the world: it reads and writes tags, and its steps may go wrong."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pd_grpc.decode import actions as act
from pd_grpc.decode import events as ev
from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.engine.base import Sampled
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.kv import UNCUT, Cut, Tag, client_of, sampled, writer_of
from pd_grpc.testing.explorer.receiving import ReceivingProcess
from pd_grpc.testing.explorer.wire import Interned

OUT = "who makes an engine raise does not stay"
YOUNGEST = "the youngest gives way"


class SteppingProcess(ReceivingProcess):
    """What of a D runs steps, one at a time."""

    machine: DecodeMachine

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: DecodeConfig,
        fine: bool,
        lends: bool = False,
        cut: Cut = UNCUT,
    ) -> None:
        super().__init__(name, epoch, ids, config, fine, lends, cut)
        self.plan: act.StepPlan | None = None
        self.keys: dict[str, TransferKey] = {}
        self.turns: dict[str, int] = {}
        """Of those with the engine that have blocks, by grant."""

    def _take_plan(self, plan: act.StepPlan) -> None:
        assert self.plan is None, "two steps at once"
        self.plan = plan
        for grant_id in (*plan.prefill_grants, *plan.decode_grants):
            transfer = self.machine.ledger.transfers[grant_id]
            self.keys[grant_id] = transfer.key
            if transfer.client is None:
                self._wrong("D never decodes without a client", str(transfer.key))

    def _rows(self) -> tuple[tuple[str, bool], ...]:
        """See `Looks.rows`; without those whose request has ended."""
        plan, live = self.plan, self.machine.ledger.transfers
        if plan is None:
            return ()
        chunks = zip(plan.prefill_grants, plan.prefill, strict=True)
        rows = [(grant, chunk.sample is not None) for grant, chunk in chunks]
        rows += [(grant, True) for grant in plan.decode_grants]
        return tuple((client_of(self.keys[grant]), s) for grant, s in rows if grant in live)

    def _raise(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        rows = dict(self.keys)
        self.keys.clear()
        raised = Fault(Reason.ENGINE_ERROR, "the engine raised")
        self._feed(ev.StepFailed(plan.step, raised))
        if len(rows) == 1 and rows.keys() & self.machine.ledger.transfers.keys():
            self._wrong(OUT, f"{[*rows.values()]} was alone in the step, and is kept")

    def _step(self, spoiled: str = "") -> None:
        """The engine's step is over. No numbers came of the KV of the client `spoiled`."""
        if self._raises_over(self.keys.values()):
            self._raise()
            return
        plan, self.plan = self.plan, None
        assert plan is not None
        prefilled: list[Sampled | None] = []
        for grant_id, chunk in zip(plan.prefill_grants, plan.prefill, strict=True):
            key = self.keys[grant_id]
            for i, token in enumerate(chunk.token_ids):
                self._store(chunk.block_table, Tag(*writer_of(key), chunk.start + i, token))
            stored = self.memory.tokens(chunk.block_table, chunk.start + len(chunk.token_ids), key)
            chosen = sampled(stored, client_of(key) == spoiled)
            prefilled.append(None if chunk.sample is None else chosen)
        decoded = []
        for grant_id, slot in zip(plan.decode_grants, plan.decode, strict=True):
            key = self.keys[grant_id]
            self._store(slot.block_table, Tag(*writer_of(key), slot.position, slot.token_id))
            stored = self.memory.tokens(slot.block_table, slot.position + 1, key)
            decoded.append(sampled(stored, client_of(key) == spoiled))
        grants = (*plan.prefill_grants, *plan.decode_grants)
        spoilt = [
            table
            for grant_id, table in zip(grants, plan.block_tables, strict=True)
            if client_of(self.keys[grant_id]) == spoiled
        ]
        self.keys.clear()
        self._feed(ev.StepDone(plan.step, prefilled, decoded))
        self._check_distrusted(spoilt)

    def _check_turns(self) -> None:
        """See that whoever was put aside was the youngest of those that the engine has, and that
        nobody's turn becomes another."""
        live = self.machine.ledger.transfers
        turns = {g: t.turn for g, t in live.items() if t.turn and t.holding is not None}
        for grant, turn in self.turns.items():
            transfer = live.get(grant)
            if transfer is None:
                continue
            if transfer.turn != turn:
                self._wrong(YOUNGEST, f"{transfer.key} was {turn}, and is {transfer.turn}")
            if transfer.holding is None and any(other > turn for other in turns.values()):
                self._wrong(YOUNGEST, f"{transfer.key} is put aside before a younger one")
        self.turns = turns

    @abstractmethod
    def _feed(self, event: Any) -> None:
        """See `EngineProcess._feed`."""
