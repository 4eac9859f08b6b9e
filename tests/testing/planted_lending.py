"""Faults planted into who may write to D's memory, and until when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pd_grpc.decode.machine import DecodeMachine
from pd_grpc.decode.quarantine import Quarantine
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.prefill.writing import Writing
from pd_grpc.testing.explorer.lending import Lending
from pd_grpc.testing.explorer.scenario import HEIR, LENT, LENT_ALIKE, LENT_ONE
from pd_grpc.testing.explorer.wire import CANCEL, UNPLUGGED, Message
from tests.testing.planting import Planted, after, nothing, with_only

_heard = Lending.heard
_take = Quarantine.take
_attached = Quarantine.attached
_lose = SessionDesk._lose
_session_over = SessionDesk.session_over


def _gone_with_its_connection(self: Lending, call: int, message: Message) -> None:
    _heard(self, call, Message(CANCEL, None) if message.kind == UNPLUGGED else message)


def _freed(self: SessionDesk, owner: Any, why: str) -> None:
    self._ledger.quarantine.gone(owner)


def _freed_after_grace(self: SessionDesk, session_id: str) -> None:
    session = self._ledger.sessions._by_id.get(session_id)
    _session_over(self, session_id)
    if session is not None:
        self._ledger.quarantine.gone(session.owner)


def _one_is_enough(self: Quarantine, grant_id: str, writer: str) -> None:
    entry = self._entries.pop(grant_id, None)
    if entry is not None:
        self._by_key.pop(entry.key, None)
        for holding in (entry.read, entry.holding):
            if not holding.released:
                holding.release()


def _split_too_far(
    self: Quarantine, grant_id: str, key: Any, holding: Any, owner: Any, writers: Any, kept: int
) -> None:
    most = len(holding.blocks)
    _take(self, grant_id, key, holding, owner, writers, min(kept + 1, most))


def _only_the_youngest(self: Quarantine, owner: Any) -> None:
    for other in [o for o in self._attached if o.name == owner.name and o != owner]:
        self.gone(other)
    _attached(self, owner)


def _stopped_already(self: Writing, record: Any) -> bool:
    record.stop_told = True
    return True


def _complete_at_once(self: DecodeMachine, event: Any) -> None:
    transfer = self._receiving(event.grant_id)
    if transfer is not None:
        self._handoff.kv_completed(transfer)


LENDING = [
    Planted(
        "a writer counts as gone when its connection ends",
        Lending,
        "heard",
        _gone_with_its_connection,
        with_only(LENT_ONE, "lose", "leave"),
    ),
    Planted(
        "a successor frees what its predecessor may write to",
        SessionDesk,
        "_lose",
        after(_lose, _freed),
        HEIR,
    ),
    Planted(
        "only the youngest process of a name counts as a writer",
        Quarantine,
        "attached",
        _only_the_youngest,
        replace(with_only(HEIR, "freeze"), prompts=(2, 2)),
        9000,
        1,
    ),
    Planted(
        "blocks are freed when the grace of their writer's session ends",
        SessionDesk,
        "session_over",
        _freed_after_grace,
        with_only(LENT_ONE, "freeze"),
    ),
    Planted(
        "the first of two writers to stop frees the blocks",
        Quarantine,
        "stopped",
        _one_is_enough,
        LENT,
    ),
    Planted(
        "blocks that are written to leave with those that were found",
        Quarantine,
        "take",
        _split_too_far,
        LENT_ALIKE,
    ),
    Planted(
        "P says that it has stopped while it writes", Writing, "stopped", _stopped_already, LENT_ONE
    ),
    Planted("P never says that it has stopped", Writing, "over", nothing, LENT_ONE),
    Planted(
        "who has died counts as a writer", Quarantine, "gone", nothing, with_only(LENT_ONE, "crash")
    ),
    Planted(
        "what is written is kept for others before its End",
        DecodeMachine,
        "_receive_progress",
        _complete_at_once,
        LENT_ALIKE,
    ),
]
