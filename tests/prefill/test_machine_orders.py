"""Any order of events: the invariants of the design hold after each, and all blocks come back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_grpc.engine.base import Sampled
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.releases import Owed
from pd_grpc.prefill.requests import Timer
from pd_grpc.prefill.states import PrefillState, Stream
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2, types_pb2
from tests.prefill.world import D1, D2, EOS, GONE, World, settle

STEPS = 400
FAULTS: list[Fault | TransportFault] = [
    GONE,
    TransportFault(Code.DEADLINE_EXCEEDED, "late"),
    Fault(Reason.NO_BLOCKS, "full"),
    Fault(Reason.RELEASED, "ended"),
    Fault(Reason.NO_SESSION, "which session"),
    Fault(Reason.KV_CORRUPT, "crc"),
]


class Chance:
    """Plays everyone else, at random: true answers, faults, silence, repeats and late words."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(
            num_blocks=12, prepare_window=3, prepare_ahead=2, prefill_queue=6, connect_s=1
        )
        self.calls: list[int] = []
        self.welcomed: set[int] = set()
        self.moves: list[Callable[[], None]] = [
            self.call,
            self.call,
            self.hang_up,
            self.welcome,
            self.welcome,
            self.break_session,
            self.answer_allocate,
            self.answer_allocate,
            self.answer_allocate,
            self.end_step,
            self.end_step,
            self.end_step,
            self.bulk,
            self.bulk,
            self.close,
            self.close,
            self.answer_first_token,
            self.answer_first_token,
            self.answer_release,
            self.talk,
            self.wait,
            self.release,
        ]

    def pick(self, kind: type[act.Action]) -> act.Action | None:
        """Some action of a kind, mostly a recent one: late and repeated answers happen."""
        found = self.world.taken(kind)
        if not found:
            return None
        recent = found[-4:] if self.chance.random() < 0.9 else found
        return self.chance.choice(recent)

    def call(self) -> None:
        decodes = self.chance.choice([(D1,), (D2,), (D1, D2), (D2, D1)])
        self.calls.append(
            self.world.call(
                f"t-{self.chance.randrange(12)}",
                tokens=self.chance.randint(1, 30),
                decodes=decodes,
                attempt=self.chance.randint(1, 4),
                max_tokens=self.chance.choice([1, 8]),
                budget_s=self.chance.choice([1.0, 5.0, 60.0]),
            )
        )

    def hang_up(self) -> None:
        if self.calls and self.chance.random() < 0.3:
            self.world.feed(ev.PrefillCallEnded(self.chance.choice(self.calls)))

    def welcome(self) -> None:
        opened = self.pick(act.OpenSession)
        # A second welcome on one stream ends everything: let that be seldom.
        second = isinstance(opened, act.OpenSession) and opened.link in self.welcomed
        if isinstance(opened, act.OpenSession) and (not second or self.chance.random() < 0.05):
            self.welcomed.add(opened.link)
            decode = self.world.decodes[opened.endpoint]
            if self.chance.random() < 0.05:
                decode.epoch += 1
            self.world.feed(ev.SessionMessage(opened.endpoint, opened.link, decode.welcome()))

    def break_session(self) -> None:
        opened = self.pick(act.OpenSession)
        if isinstance(opened, act.OpenSession) and self.chance.random() < 0.3:
            fault = self.chance.choice([GONE, None, Fault(Reason.WRONG_INSTANCE, "who")])
            self.world.feed(ev.SessionBroken(opened.endpoint, opened.link, fault))

    def answer_allocate(self) -> None:
        asked = self.pick(act.SendAllocate)
        if isinstance(asked, act.SendAllocate):
            if self.chance.random() < 0.8:
                self.world.grant(asked=asked, transfer_id=asked.key.transfer_id)
            else:
                self.world.feed(ev.AllocateAnswered(asked, None, self.chance.choice(FAULTS)))

    def end_step(self) -> None:
        run = self.pick(act.RunStep)
        if isinstance(run, act.RunStep):
            if self.chance.random() < 0.9:
                token = self.chance.choice([7, 7, EOS])
                results = [None if c.sample is None else Sampled(token) for c in run.chunks]
                self.world.feed(ev.StepDone(run.step, results))
            else:
                self.world.feed(ev.StepFailed(run.step, "bang"))

    def bulk(self) -> None:
        opened = self.pick(act.OpenTransfer)
        if not isinstance(opened, act.OpenTransfer):
            return
        key, shard = opened.key, opened.strand
        events: list[ev.Event] = [
            ev.KvAcked(key, shard, [Slab(0, 0, 1, 0, 1)], 10),
            ev.TransferCompleted(key, shard),
            ev.TransferBroken(key, shard, self.chance.choice(FAULTS)),
        ]
        self.world.feed(self.chance.choice(events))

    def close(self) -> None:
        for closing in self.world.take(act.CloseTransfer):
            self.world.feed(ev.TransferClosed(closing.key, closing.strand))

    def answer_first_token(self) -> None:
        sent = self.pick(act.SendFirstToken)
        if isinstance(sent, act.SendFirstToken):
            if self.chance.random() < 0.7:
                state = self.chance.choice(
                    [
                        types_pb2.TRANSFER_STATE_RECEIVING,
                        types_pb2.TRANSFER_STATE_DECODING,
                        types_pb2.TRANSFER_STATE_FINISHED,
                        types_pb2.TRANSFER_STATE_EXPIRED,
                    ]
                )
                event = ev.FirstTokenAnswered(sent.key, sent.attempt, state, None)
            else:
                fault = self.chance.choice(FAULTS)
                event = ev.FirstTokenAnswered(sent.key, sent.attempt, None, fault)
            self.world.feed(event)

    def answer_release(self) -> None:
        sent = self.pick(act.SendRelease)
        if isinstance(sent, act.SendRelease):
            fault = None if self.chance.random() < 0.5 else self.chance.choice(FAULTS)
            self.world.feed(ev.ReleaseAnswered(sent, fault))

    def talk(self) -> None:
        sessions = self.world.machine.conversations.all()
        if not sessions:
            return
        session = self.chance.choice(sessions)
        held = list(session.grants)
        message = decode_pb2.SessionResponse()
        kind = self.chance.randrange(8)
        if kind < 4:
            message.heartbeat_ack.sequence = 1
        elif kind == 4 and held:
            message.heartbeat_ack.unknown_grant_ids.append(self.chance.choice(held))
        elif kind == 5:
            message.drain.SetInParent()
        elif kind == 6:
            message.transfer_ended.ref.transfer_id = f"t-{self.chance.randrange(12)}"
            message.transfer_ended.ref.attempt = self.chance.randint(1, 4)
            message.transfer_ended.state = types_pb2.TRANSFER_STATE_RELEASED
        elif kind == 7 and self.chance.random() < 0.2:
            message.goodbye.reason = "leaving"
        self.world.feed(ev.SessionMessage(session.endpoint, session.link, message))

    def wait(self) -> None:
        self.world.advance(self.chance.choice([0.01, 0.1, 1.0]))

    def release(self) -> None:
        if self.chance.random() < 0.2:
            self.world.feed(ev.OperatorRelease(f"t-{self.chance.randrange(12)}", 0, ""))

    def check(self) -> None:
        """What must hold after every event."""
        machine = self.world.machine
        answered: dict[int, int] = {}
        for action in self.world.actions:
            if isinstance(action, act.FinishCall | act.FailCall):
                answered[action.call] = answered.get(action.call, 0) + 1
        assert all(times == 1 for times in answered.values()), "a call ended twice"
        holders = 0
        for key, record in machine.requests.in_flight.items():
            assert not record.state.terminal
            assert machine.requests.timers.at(Timer("budget", key)) is not None
            waits = record.state in (
                PrefillState.QUEUED,
                PrefillState.ALLOCATING,
                PrefillState.PREPARED,
            )
            assert (record.holding is None) == waits, "blocks are held from the first chunk on"
            assert record.asking == (record.state is PrefillState.ALLOCATING)
            session = machine.conversations.get(record.target.endpoint)
            assert session is not None and key in session.users
            if record.grant is not None:
                assert record.grant.grant_id in session.grants
            holders += record.holding is not None
        for session in machine.conversations.all():
            for user in session.users:
                if isinstance(user, Owed):
                    assert user.endpoint == session.endpoint
                    assert machine.placement.releases.owes(user.endpoint, user.key)
                else:
                    assert user in machine.requests.in_flight
        assert len(self.world.pool.holdings()) >= holders

    def run(self) -> None:
        for _ in range(STEPS):
            self.chance.choice(self.moves)()
            self.check()


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_events_breaks_an_invariant(seed: int) -> None:
    play = Chance(seed)
    play.run()
    settle(play.world)
    machine = play.world.machine
    play.world.advance(100)
    assert len(machine.placement.releases) == 0
    assert all(not session.users for session in machine.conversations.all())
    assert machine.placement.pool.in_flight == machine.placement.pool.granted == 0
    # Every request was answered once, but for those whose caller had left.
    ended = sum(machine.requests.ended_by_state.values())
    answers = play.world.taken(act.FinishCall) + play.world.taken(act.FailCall)
    refused = len(play.calls) - ended
    cancelled = machine.requests.ended_by_state[PrefillState.CANCELLED]
    assert len(answers) == ended - cancelled + refused


def test_the_orders_reach_every_end_and_every_way_of_a_stream() -> None:
    ends: set[PrefillState] = set()
    reasons: set[Reason] = set()
    streams: set[Stream] = set()
    for seed in range(60):
        play = Chance(seed)
        for _ in range(STEPS):
            play.chance.choice(play.moves)()
            for record in play.world.machine.requests.in_flight.values():
                streams.update(record.streams.values())
        ends |= set(play.world.machine.requests.ended_by_state)
        reasons |= {a.fault.reason for a in play.world.taken(act.FailCall)}
    assert ends == {state for state in PrefillState if state.terminal}
    assert {Stream.OPEN, Stream.BROKEN, Stream.COMPLETED} <= streams
    assert {
        Reason.DECODE_LOST,
        Reason.STAGE_DEADLINE,
        Reason.LEASE_EXPIRED,
        Reason.SUPERSEDED,
        Reason.DUPLICATE_TRANSFER,
        Reason.STALE_ATTEMPT,
        Reason.ENGINE_ERROR,
        Reason.DRAINING,
        Reason.RELEASED,
    } <= reasons


def test_a_key_is_ever_one_request(world: World) -> None:
    world.call("t-1")
    world.call("t-1")
    assert list(world.machine.requests.in_flight) == [TransferKey("t-1", 1)]
