"""A P as D's machine sees it."""

from __future__ import annotations

from typing import Any

from pd_grpc.decode import events as ev
from pd_grpc.protocol.faults import Fault
from pd_grpc.v1 import decode_pb2
from tests.decode.harness import Harness
from tests.decode.messages import (
    Request,
    hello,
)


class Prefill:
    """A P as D sees it."""

    def __init__(self, d: Harness, name: str = "p", epoch: int = 10, **fields: Any) -> None:
        self.d = d
        self.name = name
        self.epoch = epoch
        self.stream = 0
        self.session_id = ""
        self._beats = 0
        self.join(**fields)

    def join(self, **fields: Any) -> None:
        """Open a session; one that is turned away leaves an earlier one as it is."""
        stream = self.d.number()
        self.d.feed(ev.HelloReceived(stream, hello(self.name, self.epoch, **fields)))
        if stream not in self.d.session_ends:
            self.session_id = self.d.told[stream][0].welcome.session_id
        elif self.session_id:
            return
        self.stream = stream

    def breaks(self) -> None:
        """Its session's stream is gone."""
        self.d.feed(ev.SessionStreamEnded(self.stream))

    def says_goodbye(self) -> None:
        self.d.feed(ev.GoodbyeReceived(self.stream))

    def heartbeat(self, *grants: str) -> list[str]:
        """Heartbeat; returns the grants that D does not know."""
        self.beat(*grants)
        acks = [m.heartbeat_ack for m in self.d.told[self.stream] if m.HasField("heartbeat_ack")]
        assert acks[-1].sequence == self._beats
        return list(acks[-1].unknown_grant_ids)

    def beat(self, *grants: str) -> None:
        """Heartbeat, whether D listens or not."""
        self._beats += 1
        beat = decode_pb2.Heartbeat(sequence=self._beats, grant_ids=grants)
        self.d.feed(ev.HeartbeatReceived(self.stream, beat))

    def allocate(self, request: Request, **fields: Any) -> int:
        """Ask for blocks; returns the call."""
        call = self.d.number()
        self.d.feed(ev.AllocateCalled(call, request.allocate(self.session_id, **fields)))
        return call

    def granted(self, request: Request, **fields: Any) -> str:
        """Ask for blocks and get them at once; returns the grant."""
        call = self.allocate(request, **fields)
        assert call in self.d.answers, self.d.refused.get(call, "it waits")
        return str(self.d.answers[call].grant_id)

    def first_token_request(
        self, request: Request, grant_id: str, finish: int = 0, token: int | None = None
    ) -> decode_pb2.SendFirstTokenRequest:
        """The message of `first_token`."""
        first = decode_pb2.FirstToken(token_id=request.answer[0] if token is None else token)
        first.finish_reason = finish  # type: ignore[assignment]  # may be one nobody knows
        return decode_pb2.SendFirstTokenRequest(
            session_id=self.session_id, ref=request.ref, grant_id=grant_id, tokens=[first]
        )

    def first_token(
        self, request: Request, grant_id: str, finish: int = 0, token: int | None = None
    ) -> int:
        """Send the first token; returns the call."""
        call = self.d.number()
        message = self.first_token_request(request, grant_id, finish, token)
        self.d.feed(ev.FirstTokenCalled(call, message))
        return call

    def release_request(self, request: Request) -> decode_pb2.ReleaseRequest:
        """The message of `release`."""
        return decode_pb2.ReleaseRequest(
            session_id=self.session_id, ref=request.ref, writes_stopped=True
        )

    def release(self, request: Request, cause: Fault | None = None) -> int:
        """Give a transfer back; returns the call."""
        message = self.release_request(request)
        if cause is not None:
            message.cause.CopyFrom(cause.status())
        return self.d.release(message)

    def hand_off(self, request: Request) -> str:
        """Everything up to hand-off; returns the grant."""
        grant = self.granted(request)
        self.d.receive(grant, request.tokens)
        self.first_token(request, grant)
        return grant
