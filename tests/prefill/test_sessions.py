"""One session as a machine: connect, heartbeat, silence, back-off, grace, goodbye."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from pd_grpc.prefill import notices
from pd_grpc.prefill import sessions as s
from pd_grpc.prefill.actions import CloseSession, OpenSession, SendOnSession
from pd_grpc.prefill.sessions import DecodeSession, Phase
from pd_grpc.protocol.config import Timeouts
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2
from tests.prefill.world import D1, GONE, LAYOUT, Decode


class Talk:
    """A session, the time, and what it said."""

    def __init__(self) -> None:
        numbers = count(1)
        self.session = DecodeSession(
            D1,
            LAYOUT,
            lambda name: decode_pb2.Hello(decode_name=name),
            lambda: next(numbers),
            Timeouts(),
        )
        self.decode = Decode("d1")
        self.now = 0.0
        self.said: list[s.Output] = []

    def do(self, out: Sequence[s.Output] | None) -> Sequence[s.Output] | None:
        self.said += out or []
        return out

    def bind(self, user: str = "u", name: str = "") -> None:
        self.do(self.session.bind(user, name, self.now))

    def welcome(self) -> None:
        self.do(self.session.message(self.session.link, self.decode.welcome(), self.now))

    def hear(self, **message: object) -> Sequence[s.Output] | None:
        response = decode_pb2.SessionResponse(**message)  # type: ignore[arg-type]
        return self.do(self.session.message(self.session.link, response, self.now))

    def broke(self, fault: Fault | None = None) -> None:
        self.do(self.session.broken(self.session.link, fault or GONE, self.now))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.session.next_wake()) is not None and at <= end:
            self.now = at
            self.do(self.session.tick(at))
        self.now = end

    def phase(self) -> Phase:
        return self.session.phase

    def kinds(self) -> list[type]:
        kinds = [type(each) for each in self.said]
        self.said.clear()
        return kinds

    def beats(self) -> list[decode_pb2.Heartbeat]:
        return [
            each.message.heartbeat
            for each in self.said
            if isinstance(each, SendOnSession) and each.message.HasField("heartbeat")
        ]


def open_talk() -> Talk:
    """An open session with one user that holds a grant."""
    talk = Talk()
    talk.bind()
    talk.welcome()
    talk.session.grants["g-1"] = "u"
    talk.said.clear()
    return talk


def test_a_session_opens_when_it_is_needed_and_not_twice() -> None:
    talk = Talk()
    talk.bind("u", name="d1")
    talk.bind("v")
    assert talk.kinds() == [OpenSession]
    talk.welcome()
    assert talk.kinds() == [notices.Opened]
    assert (talk.phase(), talk.session.session_id) == (Phase.OPEN, "d1-s1")


def test_heartbeats_list_the_grants_that_are_held() -> None:
    talk = open_talk()
    talk.session.grants["g-2"] = "v"
    for _ in range(2):
        talk.advance(5)
        talk.hear(heartbeat_ack=decode_pb2.HeartbeatAck())
    assert [(b.sequence, list(b.grant_ids)) for b in talk.beats()] == [
        (1, ["g-1", "g-2"]),
        (2, ["g-1", "g-2"]),
    ]


def test_the_grants_of_a_user_that_has_gone_are_listed_no_more() -> None:
    talk = open_talk()
    talk.bind("v")
    talk.session.grants["g-2"] = "v"
    talk.session.unbind("u", talk.now)
    talk.advance(5)
    assert list(talk.beats()[0].grant_ids) == ["g-2"]


def test_a_d_that_is_silent_for_two_heartbeats_is_broken_with() -> None:
    talk = open_talk()
    talk.advance(9.9)
    assert talk.phase() is Phase.OPEN
    talk.advance(0.1)
    assert talk.phase() is Phase.WAITING
    assert CloseSession in talk.kinds()


def test_anything_d_says_proves_that_it_lives() -> None:
    talk = open_talk()
    for _ in range(4):
        talk.advance(9)
        talk.hear(load=decode_pb2.Load(free_blocks=3))
    assert talk.phase() is Phase.OPEN
    assert talk.session.load.free_blocks == 3


def test_reconnects_back_off_up_to_their_maximum() -> None:
    talk = open_talk()
    talk.broke()
    began, tries = talk.now, []
    while talk.phase() is not Phase.IDLE:
        at = talk.session.next_wake()
        assert at is not None
        talk.advance(at - talk.now)
        if talk.phase() is Phase.CONNECTING:
            tries.append(round(talk.now - began, 3))
            talk.broke()
    assert tries == [0.05, 0.15, 0.35, 0.6, 0.85]
    assert notices.Lost in talk.kinds()


def test_a_session_that_comes_back_within_grace_tells_d_at_once_what_it_holds() -> None:
    talk = open_talk()
    talk.broke()
    talk.advance(0.05)
    talk.said.clear()
    talk.welcome()
    (beat,) = talk.beats()
    assert list(beat.grant_ids) == ["g-1"]
    assert notices.Opened in talk.kinds()
    talk.advance(4)
    assert notices.Lost not in talk.kinds()


def test_another_epoch_of_d_has_lost_everything() -> None:
    talk = open_talk()
    talk.broke()
    talk.advance(0.05)
    talk.decode.epoch += 1
    talk.said.clear()
    talk.welcome()
    assert talk.beats() == []
    assert talk.kinds() == [notices.Lost, notices.Opened]


def test_a_break_with_nobody_bound_is_not_mended() -> None:
    talk = open_talk()
    talk.session.unbind("u", talk.now)
    talk.broke()
    assert talk.kinds() == [notices.Left]
    assert talk.session.next_wake() is None


def test_the_last_user_that_goes_while_it_is_broken_ends_it() -> None:
    talk = open_talk()
    talk.broke()
    talk.session.unbind("u", talk.now)
    assert talk.phase() is Phase.IDLE
    assert talk.session.next_wake() is None


def test_an_idle_session_says_goodbye() -> None:
    talk = open_talk()
    talk.session.unbind("u", talk.now)
    for _ in range(100):
        talk.advance(5)
        if talk.phase() is not Phase.OPEN:
            break
        talk.hear(heartbeat_ack=decode_pb2.HeartbeatAck())
    assert talk.now == pytest.approx(300, abs=6)
    last = [x for x in talk.said if isinstance(x, SendOnSession)][-1]
    assert last.message.HasField("goodbye")
    assert talk.kinds()[-2:] == [CloseSession, notices.Left]


@pytest.mark.parametrize(
    "reason", [Reason.STALE_EPOCH, Reason.WRONG_INSTANCE, Reason.LAYOUT_MISMATCH]
)
def test_a_refusal_is_final_whenever_it_comes(reason: Reason) -> None:
    for talk in (Talk(), open_talk()):
        talk.bind("w")
        talk.broke(Fault(reason, "no"))
        assert talk.phase() is Phase.IDLE
        assert talk.kinds()[-1] is notices.Refused


def test_an_open_session_that_d_ends_for_silence_is_opened_again() -> None:
    talk = open_talk()
    talk.broke(Fault(Reason.LEASE_EXPIRED, "silent"))
    assert talk.phase() is Phase.WAITING


def test_only_grants_that_are_held_can_be_unknown() -> None:
    talk = open_talk()
    assert talk.hear(heartbeat_ack=decode_pb2.HeartbeatAck(unknown_grant_ids=["x"])) == []
    out = talk.hear(heartbeat_ack=decode_pb2.HeartbeatAck(unknown_grant_ids=["x", "g-1"]))
    assert out == [notices.UnknownGrants(("g-1",))]


@pytest.mark.parametrize("first", ["heartbeat_ack", "load", "goodbye"])
def test_a_d_that_says_something_else_before_welcome_is_refused(first: str) -> None:
    talk = Talk()
    talk.bind()
    message = decode_pb2.SessionResponse()
    getattr(message, first).SetInParent()
    talk.do(talk.session.message(talk.session.link, message, 0))
    assert talk.kinds() == [OpenSession, CloseSession, notices.Refused]


def test_a_second_welcome_is_refused() -> None:
    talk = open_talk()
    talk.welcome()
    assert talk.kinds() == [CloseSession, notices.Refused]


def test_what_an_earlier_stream_says_means_nothing() -> None:
    talk = open_talk()
    earlier = talk.session.link
    talk.broke()
    talk.advance(0.05)
    assert talk.session.message(earlier, talk.decode.welcome(), talk.now) is None
    assert talk.session.broken(earlier, GONE, talk.now) is None


def test_a_connect_that_takes_too_long_is_given_up() -> None:
    talk = Talk()
    talk.bind()
    talk.advance(2)
    assert talk.kinds() == [OpenSession, CloseSession, notices.Unreachable]
    assert talk.phase() is Phase.IDLE


def test_leaving_while_connecting_says_nothing() -> None:
    talk = Talk()
    talk.bind()
    talk.do(talk.session.leave("stop"))
    assert talk.kinds() == [OpenSession, CloseSession]
