"""What becomes of P's links to its Ds, as lines of its log."""

from __future__ import annotations

from pd_grpc.prefill import events as ev
from pd_grpc.prefill.prepare import PreparePool
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.messages import transport_label
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.v1 import decode_pb2

_OF_LINKS = frozenset(
    {
        ev.SessionMessage,
        ev.SessionBroken,
        ev.TransportFailed,
        ev.AllocateAnswered,
        ev.FirstTokenAnswered,
        ev.ReleaseAnswered,
    }
)


class LinkLog:
    """Writes what is news: that a session opened or was lost, and which Ds P does not ask.

    `heard` sees each event before the machine does, `look` what that made of the breakers.
    """

    def __init__(self, log: InstanceLog, pool: PreparePool) -> None:
        self._log = log
        self._pool = pool
        self._is_open: dict[str, bool] = {}
        self._breakers: set[str] = set()
        self._news = False

    def heard(self, event: ev.Event) -> None:
        """An event is about to be handled."""
        if type(event) not in _OF_LINKS:
            return  # Most are of KV and steps.
        if isinstance(event, ev.SessionMessage):
            if event.message.WhichOneof("message") == "welcome":
                self._opened(event.endpoint, event.message.welcome)
            elif self._breakers:
                self._news = True
        elif isinstance(event, ev.SessionBroken):
            self._lost(event.endpoint, event.fault)
        elif isinstance(event, ev.TransportFailed):
            name = transport_label(event.transport)
            text = "no KV by %s: %s"
            self._note(Event.TRANSPORT_FAILED, text, event.endpoint, None, name, event.why)
        elif isinstance(event, ev.AllocateAnswered):
            self._news = self._news or event.fault is not None or bool(self._breakers)
        elif isinstance(event, ev.FirstTokenAnswered | ev.ReleaseAnswered):
            self._news = self._news or event.fault is not None
            if isinstance(event, ev.ReleaseAnswered) and event.fault is not None:
                self._unheard(event.sent.endpoint, event)

    def look(self, now: float) -> None:
        """The event has been handled."""
        if not self._news:
            return
        self._news = False
        faults = {v.endpoint: v.breaker_fault for v in self._pool.lanes(now) if v.breaker_fault}
        for endpoint in sorted(faults.keys() - self._breakers):
            fault = faults[endpoint]
            text = "not asked until it answers again: %s"
            self._note(Event.BREAKER_OPENED, text, endpoint, fault, fault.message)
        for endpoint in sorted(self._breakers - faults.keys()):
            self._note(Event.BREAKER_CLOSED, "asked again", endpoint, None)
        self._breakers = set(faults)

    def forget(self, endpoint: str) -> None:
        """There is nothing left to do with a D."""
        self._is_open.pop(endpoint, None)

    def _opened(self, endpoint: str, welcome: decode_pb2.Welcome) -> None:
        self._news = True
        self._is_open[endpoint] = True
        name, transport = welcome.instance.name, transport_label(welcome.transport)
        text = "session with %s, KV by %s"
        self._note(Event.SESSION_OPENED, text, endpoint, None, name, transport)

    def _lost(self, endpoint: str, fault: Fault | TransportFault | None) -> None:
        """Tries to connect that go on failing are no news."""
        self._news = True
        if self._is_open.get(endpoint, True):
            self._is_open[endpoint] = False
            why = "it was ended" if fault is None else fault.message
            self._note(Event.SESSION_LOST, "no session: %s", endpoint, fault, why)

    def _unheard(self, endpoint: str, event: ev.ReleaseAnswered) -> None:
        transfer_id, attempt = event.sent.key
        fault = event.fault
        self._log.note(
            Event.RELEASE_UNHEARD,
            "was not released: %s",
            fault,
            peer=endpoint,
            transfer_id=transfer_id,
            attempt=attempt,
        )

    def _note(
        self,
        event: Event,
        text: str,
        endpoint: str,
        fault: Fault | TransportFault | None,
        *args: object,
    ) -> None:
        reason = fault.reason.value if isinstance(fault, Fault) else None
        code = None if fault is None else fault.code.name
        self._log.note(event, text, *args, peer=endpoint, code=code, reason=reason)
