"""P's end of its standing conversation with one D, as a machine: connect, heartbeat, notice
silence, reconnect, take over, leave."""

from __future__ import annotations

import enum
from collections.abc import Callable

from pd_grpc.prefill.actions import Action, CloseSession, OpenSession, SendOnSession
from pd_grpc.prefill.decode_faults import our_mistake
from pd_grpc.prefill.notices import (
    Draining,
    Ended,
    Left,
    Lost,
    Notice,
    Opened,
    Refused,
    UnknownGrants,
    Unreachable,
)
from pd_grpc.prefill.welcomes import objection
from pd_grpc.protocol.config import SILENT_HEARTBEATS, Timeouts
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault, not_meant
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import (
    INLINE,
    plain_transport,
    seconds,
)
from pd_grpc.protocol.timers import Timers
from pd_grpc.v1 import decode_pb2, types_pb2

_TURNED_AWAY = frozenset(
    {Reason.STALE_EPOCH, Reason.WRONG_INSTANCE, Reason.LAYOUT_MISMATCH, Reason.FEATURE}
)
"""Ends of an open session after which another try would be told the same."""


def backoff_s(timeouts: Timeouts, tries: int) -> float:
    """How long to wait after so many tries in a row have failed, before the next."""
    wait_s = timeouts.reconnect_min_s * 2.0 ** min(tries - 1, 32)
    return min(wait_s, timeouts.reconnect_max_s)


class Phase(enum.Enum):
    """Where the conversation stands."""

    IDLE = "idle"
    CONNECTING = "connecting"
    OPEN = "open"
    WAITING = "waiting"
    """Broken; the back-off before the next try runs."""


_DUE_IN = {
    "connect": (Phase.CONNECTING,),
    "heartbeat": (Phase.OPEN,),
    "silence": (Phase.OPEN,),
    "idle": (Phase.OPEN,),
    "reconnect": (Phase.WAITING,),
    "grace": (Phase.WAITING, Phase.CONNECTING),
}
"""Each timer, and the phases in which it means something."""


Output = Action | Notice


class DecodeSession:
    """The session with the D at one endpoint.

    Every method returns what must be done and what has become known, in order. `users` are the
    requests that are bound to this D, by whatever key; the session lives while there are any, and
    `session_idle_s` longer.
    """

    def __init__(
        self,
        endpoint: str,
        layout: KvLayout,
        hello: Callable[[str], decode_pb2.Hello],
        next_link: Callable[[], int],
        timeouts: Timeouts,
    ) -> None:
        self.endpoint = endpoint
        self.phase = Phase.IDLE
        self.link = 0
        self.welcome = decode_pb2.Welcome()
        """The last one; empty before the first."""
        self.draining = False
        self.load = decode_pb2.Load()
        self.grants: dict[str, object] = {}
        """Grants we hold, each with the user that holds it."""
        self._layout = layout
        self._hello = hello
        self._next_link = next_link
        self._timeouts = timeouts
        self._users: set[object] = set()
        self._offered: frozenset[int] = INLINE
        self._failed: set[int] = set()
        """Transports that did not get us to this process of D."""
        self._name = ""
        self._sequence = 0
        self._tries = 0
        self._timers: Timers[str] = Timers()

    @property
    def session_id(self) -> str:
        """What calls carry; that of the broken session while there is no other."""
        return self.welcome.session_id

    @property
    def instance(self) -> types_pb2.Instance:
        """Who D is."""
        return self.welcome.instance

    @property
    def kv_progress_s(self) -> float:
        """Longest silence of a shard while KV is unacknowledged, as D has it."""
        return seconds(self.welcome.kv_progress) or self._timeouts.kv_progress_s

    @property
    def users(self) -> frozenset[object]:
        """Who is bound to this D."""
        return frozenset(self._users)

    def next_wake(self) -> float | None:
        """When `tick` must be called."""
        return self._timers.next()

    def bind(self, user: object, name: str, now: float) -> list[Output]:
        """A request turns to this D, which it calls `name`; connect if need be."""
        self._users.add(user)
        self._timers.cancel("idle")
        return self._connect(name, now) if self.phase is Phase.IDLE else []

    def unbind(self, user: object, now: float) -> list[Output]:
        """A request has nothing to do with this D any more."""
        self._users.discard(user)
        for grant_id in [g for g, holder in self.grants.items() if holder == user]:
            del self.grants[grant_id]
        if self._users:
            return []
        if self.phase is Phase.WAITING:
            return self._become_idle()
        if self.phase is Phase.OPEN:
            self._timers.set("idle", now + self._timeouts.session_idle_s)
        return []

    def message(
        self, link: int, message: decode_pb2.SessionResponse, now: float
    ) -> list[Output] | None:
        """D said something; None when it came too late to mean anything."""
        if link != self.link or self.phase not in (Phase.CONNECTING, Phase.OPEN):
            return None
        kind = message.WhichOneof("message")
        if self.phase is Phase.CONNECTING:
            if kind == "welcome":
                return self._welcomed(message.welcome, now)
            return self._misspoke(f"{kind} came before welcome", now)
        self._timers.set("silence", now + SILENT_HEARTBEATS * self._heartbeat_s)
        if kind == "heartbeat_ack":
            unknown = tuple(g for g in message.heartbeat_ack.unknown_grant_ids if g in self.grants)
            return [UnknownGrants(unknown)] if unknown else []
        if kind == "load":
            self.load = message.load
        elif kind == "drain":
            self.draining = True
            return [Draining()]
        elif kind == "transfer_ended":
            return [Ended(message.transfer_ended)]
        elif kind == "goodbye":
            said = message.goodbye.reason or "no reason"
            lost = self._lost(f"decode instance {self._who} left: {said}")
            return [CloseSession(self.endpoint, link, graceful=True), *self._become_idle(), lost]
        elif kind == "welcome":
            return self._misspoke("a second welcome came", now)
        return []

    def broken(
        self, link: int, fault: Fault | TransportFault | None, now: float
    ) -> list[Output] | None:
        """The stream has ended; None when it is not the one we talk on."""
        if link != self.link or self.phase not in (Phase.CONNECTING, Phase.OPEN):
            return None
        if isinstance(fault, Fault) and (
            self.phase is Phase.CONNECTING or fault.reason in _TURNED_AWAY
        ):
            own = our_mistake(fault, "our hello")
            return [*self._become_idle(), Refused(own, self._name)]
        if isinstance(fault, TransportFault) and fault.code is Code.UNIMPLEMENTED:
            text = f"{self._who} is no decode instance: {fault.message}"
            meant = self._name or self.endpoint
            wrong = not_meant(Reason.WRONG_INSTANCE, text, meant, "")
            return [*self._become_idle(), Refused(wrong, self._name)]
        why = "the session ended" if fault is None else str(fault)
        if self.phase is Phase.CONNECTING:
            return self._failed_to_connect(why, now)
        return self._break(now)

    def transport_failed(self, link: int, transport: int, now: float) -> list[Output] | None:
        """What the welcome chose does not get us there: say hello again without it; None when it is
        not the stream we talk on."""
        if link != self.link or self.phase is not Phase.CONNECTING:
            return None
        self._failed.add(plain_transport(transport))
        close = CloseSession(self.endpoint, link, graceful=False)
        return [close, *self._connect(self._name, now)]

    def tick(self, now: float) -> list[Output]:
        """Do what is due."""
        out: list[Output] = []
        for due in self._timers.pop_due(now):
            if self.phase not in _DUE_IN[due]:
                continue  # What was due before it has ended that.
            if due == "connect":
                out.append(CloseSession(self.endpoint, self.link, graceful=False))
                waited = f"no welcome within {self._timeouts.connect_s:g} s"
                out += self._failed_to_connect(waited, now)
            elif due == "heartbeat":
                out += self._beat(now)
            elif due == "silence":
                out.append(CloseSession(self.endpoint, self.link, graceful=False))
                out += self._break(now)
            elif due == "reconnect":
                out += self._connect(self._name, now)
            elif due == "grace":
                out += self._out_of_grace()
            elif due == "idle":
                out += [*self.leave("idle"), Left()]
        return out

    def refuse(self, fault: Fault) -> list[Output]:
        """Have nothing to do with this D, for what it said in its welcome."""
        close = CloseSession(self.endpoint, self.link, graceful=False)
        return [close, *self._become_idle(), Refused(fault, self._name)]

    def leave(self, reason: str) -> list[Output]:
        """Say goodbye, on purpose."""
        if self.phase is Phase.OPEN:
            goodbye = decode_pb2.SessionRequest(goodbye=decode_pb2.Goodbye(reason=reason))
            out: list[Output] = [
                SendOnSession(self.endpoint, self.link, goodbye),
                CloseSession(self.endpoint, self.link, graceful=True),
            ]
        elif self.phase is Phase.CONNECTING:
            out = [CloseSession(self.endpoint, self.link, graceful=False)]
        else:
            out = []
        return [*out, *self._become_idle()]

    @property
    def _heartbeat_s(self) -> float:
        return seconds(self.welcome.heartbeat) or self._timeouts.heartbeat_s

    @property
    def _who(self) -> str:
        name = self.welcome.instance.name
        return f"{name} at {self.endpoint}" if name else f"at {self.endpoint}"

    def _connect(self, name: str, now: float) -> list[Output]:
        self.phase = Phase.CONNECTING
        self.link = self._next_link()
        self._name = name
        self._timers.set("connect", now + self._timeouts.connect_s)
        hello = self._hello(name)
        left = [t for t in hello.transports if plain_transport(t) not in self._failed]
        del hello.transports[:]
        hello.transports.extend(left)
        self._offered = INLINE.union(left)
        return [OpenSession(self.endpoint, self.link, hello)]

    def _welcomed(self, welcome: decode_pb2.Welcome, now: float) -> list[Output]:
        fault = objection(welcome, self.endpoint, self._name, self._layout, self._offered)
        if fault is not None:
            return self.refuse(fault)
        out: list[Output] = []
        if self.instance.epoch not in (0, welcome.instance.epoch):
            out.append(self._lost(f"decode instance {self._who} was restarted"))
            self.grants.clear()
            # Another process has other memory.
            self._failed.clear()
        self.phase = Phase.OPEN
        self.welcome = welcome
        self.draining = False
        self._sequence = 0
        self._tries = 0
        for timer in ("connect", "grace"):
            self._timers.cancel(timer)
        self._timers.set("silence", now + SILENT_HEARTBEATS * self._heartbeat_s)
        self._timers.set("heartbeat", now + self._heartbeat_s)
        if not self._users:
            self._timers.set("idle", now + self._timeouts.session_idle_s)
        if self.grants:
            out += self._beat(now)
        return [*out, Opened()]

    def _misspoke(self, what: str, now: float) -> list[Output]:
        return self.refuse(
            Fault(Reason.WRONG_STATE, f"{self._who} broke the order of a session: {what}")
        )

    def _failed_to_connect(self, why: str, now: float) -> list[Output]:
        self._timers.cancel("connect")
        fault = Fault(Reason.DECODE_LOST, f"decode instance {self._who} cannot be reached: {why}")
        if self._users and self._timers.at("grace") is not None:
            self._back_off(now)
            return [Unreachable(fault)]
        return [*self._become_idle(), Unreachable(fault)]

    def _break(self, now: float) -> list[Output]:
        if not self._users:
            return [*self._become_idle(), Left()]
        for timer in ("heartbeat", "silence", "idle"):
            self._timers.cancel(timer)
        self._timers.set("grace", now + seconds(self.welcome.grace))
        self._back_off(now)
        return []

    def _back_off(self, now: float) -> None:
        self.phase = Phase.WAITING
        self._tries += 1
        self._timers.set("reconnect", now + backoff_s(self._timeouts, self._tries))

    def _beat(self, now: float) -> list[Output]:
        self._sequence += 1
        self._timers.set("heartbeat", now + self._heartbeat_s)
        beat = decode_pb2.Heartbeat(sequence=self._sequence, grant_ids=list(self.grants))
        message = decode_pb2.SessionRequest(heartbeat=beat)
        return [SendOnSession(self.endpoint, self.link, message)]

    def _out_of_grace(self) -> list[Output]:
        out: list[Output] = []
        if self.phase is Phase.CONNECTING:
            out.append(CloseSession(self.endpoint, self.link, graceful=False))
        grace_s = seconds(self.welcome.grace)
        lost = self._lost(f"decode instance {self._who} did not come back within {grace_s:g} s")
        # And so it is for those that come next, until a probe finds otherwise.
        return [*out, *self._become_idle(), lost, Unreachable(lost.fault)]

    def _lost(self, why: str) -> Lost:
        return Lost(Fault(Reason.DECODE_LOST, why))

    def _become_idle(self) -> list[Output]:
        self.phase = Phase.IDLE
        self.draining = False
        self._tries = 0
        for timer in _DUE_IN:
            self._timers.cancel(timer)
        return []
