"""The lines of D's failed requests."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.context import Context

from pd_grpc.decode.actions import Changed
from pd_grpc.decode.ledger import Ledger
from pd_grpc.protocol.failures import NOTED_WHERE_IT_AROSE, FailureLog
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.telemetry.instance_log import InstanceLog


@dataclass
class _Known:
    context: Context
    request_id: str
    direct: bool = False
    """Whether a client called without a router of ours in between."""


class RequestLog:
    """Knows whose each live transfer is, and writes the line of one that fails."""

    def __init__(self, log: InstanceLog, ledger: Ledger) -> None:
        self._failures = FailureLog(log)
        self._ledger = ledger
        self._known: dict[TransferKey, _Known] = {}

    def __len__(self) -> int:
        """Transfers of which something is kept."""
        return len(self._known)

    def asked(self, key: TransferKey, context: Context, request_id: str) -> None:
        """P asks for blocks; call `asked_in_vain` when it has its answer."""
        self._known.setdefault(key, _Known(context, request_id))

    def asked_in_vain(self, key: TransferKey) -> None:
        """Forget it, unless there is such a transfer."""
        if self._ledger.of_key(key) is None:
            self._known.pop(key, None)

    def called(self, key: TransferKey, context: Context, request_id: str, direct: bool) -> None:
        """A client waits for a transfer."""
        known = self._known.setdefault(key, _Known(context, request_id))
        known.direct = direct

    def turned_away(
        self,
        key: TransferKey | None,
        fault: Fault,
        context: Context,
        request_id: str,
        direct: bool,
    ) -> None:
        """A client's call was refused; `key` None is one that no P has to do with."""
        told = key is not None and self._ledger.tombstones.get(key, self._ledger.now) is not None
        if told and fault.reason in NOTED_WHERE_IT_AROSE:
            return  # At the end of the transfer that it came too late for.
        self._failures.note(fault, direct=direct, context=context, key=key, request_id=request_id)

    def changed(self, change: Changed) -> None:
        """A transfer moved."""
        known = self._known.get(change.key)
        if change.after.terminal:
            self._known.pop(change.key, None)
        if change.fault is not None:
            self._failures.note(
                change.fault,
                direct=known is not None and known.direct,
                context=None if known is None else known.context,
                key=change.key,
                request_id="" if known is None else known.request_id,
            )
