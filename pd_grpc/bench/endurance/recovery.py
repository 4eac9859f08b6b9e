"""What the router says of its own recovering."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.v1 import admin_pb2


@dataclass(frozen=True)
class Recovery:
    """Whether the router sends a request elsewhere when its instance fails, and how many requests
    it has done so with: before their first token, and after it."""

    switched_on: bool
    retried: int = 0
    continued: int = 0

    @property
    def in_words(self) -> str:
        """For people."""
        return "recovers requests" if self.switched_on else "does not recover requests"


def recovery_of(info: admin_pb2.ServerInfo) -> Recovery:
    """As the router's AdminService tells it."""
    on = info.settings["retry"] == info.settings["continuation"] == "True"
    return Recovery(on, info.recovery.retries, info.recovery.continuations)
