"""What became of the requests of a soak, counted."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pd_grpc.bench.endurance.asking import How, Reply
from pd_grpc.bench.endurance.plan import Manner
from pd_grpc.protocol.faults import Code, Fault

MOST_TOLD = 50
"""Failures that are described one by one."""


class Verdict(str, enum.Enum):
    """What a request counts as."""

    OK = "ok"
    """Answered whole, and rightly."""
    REFUSED = "refused"
    """Told before any token, with a reason of ours, that it is not served: as it should be where
    the client asked for what cannot be, or there was no room."""
    LEFT = "left"
    """The client cancelled it."""
    DEADLINE = "deadline"
    """The budget, which the client had made short, was over."""
    FAILED = "failed"
    """Ended with a status that its client did not cause."""
    HUNG = "hung"
    """Not ended when its time was over, or only by that."""


_REFUSALS = {
    Manner.INVALID: {Code.INVALID_ARGUMENT},
    Manner.REPEATED: {Code.ALREADY_EXISTS},
    Manner.DUPLICATE: {Code.ALREADY_EXISTS},
}
_NO_ROOM = {Code.RESOURCE_EXHAUSTED}


def verdict(manner: Manner, reply: Reply) -> Verdict:
    """What one request counts as, wrong tokens aside."""
    if reply.how is How.NEVER:
        return Verdict.HUNG
    if reply.how is How.COMPLETE:
        return Verdict.OK
    if reply.how is How.LEFT:
        return Verdict.LEFT
    if reply.fault is None:
        return Verdict.FAILED
    code = reply.fault.code
    if code is Code.DEADLINE_EXCEEDED:
        return Verdict.DEADLINE if manner is Manner.DEADLINE else Verdict.HUNG
    told = isinstance(reply.fault, Fault) and not reply.token_ids
    if told and code in _NO_ROOM | _REFUSALS.get(manner, set()):
        return Verdict.REFUSED
    return Verdict.FAILED


@dataclass
class Tally:
    """Counts of a run, which grow as requests end."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failed_by_code: Counter[str] = field(default_factory=Counter)
    failed_by_reason: Counter[str] = field(default_factory=Counter)
    refused_by_reason: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)
    """The first requests with which something was wrong."""
    _had_doubles: set[str] = field(default_factory=set)
    """Names of which one call was refused because there was another."""

    def add(self, name: str, manner: Manner, reply: Reply, mistake: str, during: str) -> str:
        """Count one request. `mistake` says what is wrong with what came, if anything is; `during`
        what was going wrong in the system at its end. Returns in words that it failed, hung or was
        answered wrongly; nothing otherwise. Of two calls of one name, one may be refused for the
        sake of the other: where both are, the second one fails."""
        found = verdict(manner, reply)
        if found is Verdict.REFUSED and reply.fault and reply.fault.code is Code.ALREADY_EXISTS:
            found = Verdict.FAILED if name in self._had_doubles else found
            self._had_doubles.add(name)
        self.verdicts[found] += 1
        self.wrong += bool(mistake)
        fault = reply.fault
        if found is Verdict.REFUSED and isinstance(fault, Fault):
            self.refused_by_reason[fault.reason.value] += 1
        if found is Verdict.FAILED:
            code = fault.code.name if fault is not None else "OK"
            reason = fault.reason.value if isinstance(fault, Fault) else ""
            self.failed_by_code[code] += 1
            self.failed_by_reason[reason or f"bare {code}"] += 1
        if not mistake and found not in (Verdict.FAILED, Verdict.HUNG):
            return ""
        if len(self.told) < MOST_TOLD:
            self.told.append(
                {
                    "request": name,
                    "manner": manner.value,
                    "verdict": found.value,
                    "wrong": mistake,
                    "fault": "" if fault is None else str(fault),
                    "tokens": len(reply.token_ids),
                    "took_s": round(reply.ended_at - reply.sent_at, 3),
                    "during": during,
                }
            )
        why = mistake or ("" if fault is None else str(fault))
        return f"{name} {found.value} after {len(reply.token_ids)} tokens: {why} ({during})"

    def figures(self) -> dict[str, Any]:
        """As they stand in the report."""
        counts = self.verdicts
        return {
            "requests": sum(counts.values()),
            "ok": counts[Verdict.OK],
            "refused": counts[Verdict.REFUSED],
            "refused_by_reason": dict(sorted(self.refused_by_reason.items())),
            "cancelled_by_client": counts[Verdict.LEFT],
            "deadline_of_client": counts[Verdict.DEADLINE],
            "failed_by_code": dict(sorted(self.failed_by_code.items())),
            "failed_by_reason": dict(sorted(self.failed_by_reason.items())),
            "hung": counts[Verdict.HUNG],
            "wrong_tokens": self.wrong,
        }
