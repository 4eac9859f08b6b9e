"""What becomes of D's sessions with its Ps, as lines of its log."""

from __future__ import annotations

from pd_grpc.decode import events as ev
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Fault
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event


class SessionLog:
    """Knows the name of each stream's P, and whether it leaves on purpose."""

    def __init__(self, log: InstanceLog) -> None:
        self._log = log
        self._names: dict[int, str] = {}
        self._leaves = False

    def hello(self, stream: int, name: str) -> None:
        """A P has called."""
        self._names[stream] = name

    def heard(self, event: ev.Event) -> None:
        """An event is about to be handled; call `handled` afterwards."""
        self._leaves = isinstance(event, ev.GoodbyeReceived)

    def handled(self) -> None:
        """It has been."""
        self._leaves = False

    def admitted(self, owner: Owner) -> None:
        """P was taken in, for the first time or again."""
        self._log.note(Event.SESSION_OPENED, "session with %s", owner.name, peer=owner.name)

    def dismissed(self, owner: Owner) -> None:
        """P is gone, and with it what it had not handed over."""
        if self._leaves:
            self._log.note(Event.SESSION_ENDED, "%s said goodbye", owner.name, peer=owner.name)
        else:
            text = "%s did not come back: what it had not handed over has ended"
            self._log.note(Event.SESSION_LOST, text, owner.name, peer=owner.name)

    def refused(self, stream: int, fault: Fault) -> None:
        """A stream is ended with a fault, be it the first answer or a later one."""
        self._log.note(
            Event.SESSION_LOST,
            "no session: %s",
            fault.message,
            peer=self._names.get(stream),
            code=fault.code.name,
            reason=fault.reason.value,
        )

    def closed(self, stream: int, broke: bool) -> None:
        """A stream is gone; `broke` when nobody had ended its session."""
        name = self._names.pop(stream)
        if broke:
            self._log.note(Event.SESSION_LOST, "the session with %s broke", name, peer=name)
