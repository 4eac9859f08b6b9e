"""P's machine with the rest of the world played by the test: events in, actions out, time by
hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TypeVar

import pytest

from pd_grpc.blocks.pool import BlockPool, Holding
from pd_grpc.engine.base import Sampled
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.states import PrefillState
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, Fault, Reason, TransportFault, read_status
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.messages import duration, layout_to_proto
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.protocol.shards import Place, whole
from pd_grpc.transport.base import Slab
from pd_grpc.v1 import decode_pb2, layout_pb2, prefill_pb2, sampling_pb2, types_pb2
from tests.blocks.emptying import assert_whole

A = TypeVar("A", bound=act.Action)

BLOCK = 4
LAYOUT = KvLayout(
    model="m",
    positions="p",
    block_size=BLOCK,
    groups=(
        KvGroup(
            GroupKind.FULL,
            2,
            (Plane(PlaneKind.K, "uint8", 1, 16), Plane(PlaneKind.V, "uint8", 1, 16)),
        ),
    ),
)
EOS = 2
D1, D2, D3 = "d1:1", "d2:1", "d3:1"
GONE = TransportFault(Code.UNAVAILABLE, "connection refused")
IN_FLIGHT = [state for state in PrefillState if not state.terminal]


class Decode:
    """One D, as far as the machine can tell."""

    def __init__(self, name: str, epoch: int = 100) -> None:
        self.name = name
        self.epoch = epoch
        self.sessions = 0

    def welcome(self, **fields: object) -> decode_pb2.SessionResponse:
        """The welcome of the next session; `fields` differ from the usual."""
        self.sessions += 1
        usual: dict[str, object] = {
            "instance": types_pb2.Instance(
                name=self.name, epoch=self.epoch, role=types_pb2.ROLE_DECODE
            ),
            "session_id": f"{self.name}-s{self.sessions}",
            "layout": layout_to_proto(LAYOUT),
            "transport": layout_pb2.TRANSPORT_INLINE,
            "lease": duration(15),
            "grace": duration(1),
            "heartbeat": duration(5),
        }
        welcome = decode_pb2.Welcome(**{**usual, **fields})  # type: ignore[arg-type]
        return decode_pb2.SessionResponse(welcome=welcome)


class World:
    """Drives a machine. Every action it returns is kept in `actions`; `take` picks some out."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int = 2000,
        features: tuple[str, ...] = (),
        carriers: Carriers = INLINE_ALONE,
        **settings: object,
    ) -> None:
        self.config = PrefillConfig.model_validate(
            {
                "chunk_tokens": 8,
                "block_size": BLOCK,
                "num_blocks": num_blocks,
                "prefill_batch": 4,
                **settings,
            }
        )
        self.pool = BlockPool(num_blocks)
        self.limits = ModelLimits(
            layout=LAYOUT,
            vocab_size=1000,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            features=frozenset(features),
            eos_token_ids=frozenset({EOS}),
            shards=(Place(whole(LAYOUT)),),
        )
        instance = types_pb2.Instance(name="p", epoch=50, role=types_pb2.ROLE_PREFILL)
        self.machine = PrefillMachine(
            self.config, instance, self.limits, self.pool, SimTokenizer(1000), carriers
        )
        self.now = 1000.0
        self.actions: list[act.Action] = []
        self.decodes = {D1: Decode("d1"), D2: Decode("d2"), D3: Decode("d3")}
        self.calls = count(1)
        self.occupied: Holding | None = None

    # --- the world acts ----------------------------------------------------------------------

    def feed(self, *events: ev.Event) -> None:
        for event in events:
            self._do(self.machine.handle(event, self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, waking the machine whenever it asked to be woken."""
        end = self.now + seconds
        for _ in range(10_000):
            wake = self.machine.next_wake()
            if wake is None or wake > end:
                break
            self.now = max(self.now, wake)
            self._do(self.machine.tick(self.now))
        else:
            raise AssertionError("the machine never sleeps")
        self.now = end

    def call(
        self,
        transfer_id: str = "t-1",
        tokens: int = 6,
        decodes: tuple[str, ...] = (D1,),
        attempt: int = 1,
        max_tokens: int = 16,
        budget_s: float = 100.0,
        generated: tuple[int, ...] = (),
        decode_name: str = "",
        **fields: object,
    ) -> int:
        """Call Prefill; returns the call's number."""
        call = next(self.calls)
        request = prefill_request(
            transfer_id, tokens, decodes, attempt, max_tokens, generated, decode_name, **fields
        )
        self.feed(ev.PrefillCalled(call, request, budget_s))
        return call

    def connect(self, endpoint: str = D1, **welcome: object) -> None:
        """D welcomes the session that was opened last."""
        opened = [a for a in self.taken(act.OpenSession) if a.endpoint == endpoint][-1]
        said = self.decodes[endpoint].welcome(**welcome)
        self.feed(ev.SessionMessage(endpoint, opened.link, said))

    def say(self, endpoint: str = D1, **message: object) -> None:
        """D says something on its session."""
        session = self.machine.conversations[endpoint]
        response = decode_pb2.SessionResponse(**message)  # type: ignore[arg-type]
        self.feed(ev.SessionMessage(endpoint, session.link, response))

    def break_session(
        self, endpoint: str = D1, fault: Fault | TransportFault | None = GONE
    ) -> None:
        link = self.machine.conversations[endpoint].link
        self.feed(ev.SessionBroken(endpoint, link, fault))

    def ask(self, transfer_id: str = "t-1") -> act.SendAllocate:
        """The last Allocate of a transfer."""
        return [a for a in self.taken(act.SendAllocate) if a.key.transfer_id == transfer_id][-1]

    def grant(
        self,
        transfer_id: str = "t-1",
        asked: act.SendAllocate | None = None,
        transport: layout_pb2.Transport = layout_pb2.TRANSPORT_INLINE,
        places: Sequence[Place] = (),
    ) -> None:
        """D grants what the last Allocate asked for; `places` are those of its shards, if it has
        several."""
        asked = asked or self.ask(transfer_id)
        response = decode_pb2.AllocateResponse(
            grant_id=f"g-{transfer_id}-{asked.ask}", transport=transport
        )
        if asked.request.kv_needed:
            blocks = LAYOUT.blocks_for(asked.request.prompt_tokens)
            response.wanted.add(start=0, count=blocks)
            if not places:
                response.shards.add(endpoint=f"bulk-{asked.endpoint}")
            for i, place in enumerate(places):
                response.shards.append(place.to_proto())
                response.shards[i].endpoint = f"bulk-{i}-{asked.endpoint}"
        self.feed(ev.AllocateAnswered(asked, response, None))

    def refuse(self, fault: Fault | TransportFault, transfer_id: str = "t-1") -> None:
        self.feed(ev.AllocateAnswered(self.ask(transfer_id), None, fault))

    def step(
        self, token: int = 7, tokenless: Sequence[str] = (), not_finite: bool = False
    ) -> act.RunStep:
        """The engine finishes the step it was given last; every prompt that ends gives `token`, but
        for the transfers that it has none for, because what it computed is `not_finite` or not."""
        run = self.taken(act.RunStep)[-1]
        results = [
            None
            if chunk.sample is None
            else Sampled(-1, fault="no token is left", not_finite=not_finite)
            if key.transfer_id in tokenless
            else Sampled(token)
            for key, chunk in zip(run.keys, run.chunks, strict=True)
        ]
        self.feed(ev.StepDone(run.step, results))
        return run

    def answer_first_token(
        self,
        state: types_pb2.TransferState | None = types_pb2.TRANSFER_STATE_RECEIVING,
        fault: Fault | TransportFault | None = None,
        transfer_id: str = "t-1",
    ) -> None:
        sent = [a for a in self.taken(act.SendFirstToken) if a.key.transfer_id == transfer_id][-1]
        given = None if fault is not None else state
        self.feed(ev.FirstTokenAnswered(sent.key, sent.attempt, given, fault))

    def answer_release(self, fault: Fault | TransportFault | None = None) -> None:
        """D answers the last Release."""
        self.feed(ev.ReleaseAnswered(self.taken(act.SendRelease)[-1], fault))

    def complete(self, transfer_id: str = "t-1", attempt: int = 1) -> None:
        """The shard has acknowledged everything."""
        key = TransferKey(transfer_id, attempt)
        self.feed(
            ev.KvAcked(key, 0, [Slab(0, 0, 2, 0, 1)], 100),
            ev.TransferCompleted(key, 0),
        )

    def confirm_closed(self) -> None:
        """The bulk side confirms every close it was asked for, and the engine finishes its step."""
        for close in self.take(act.CloseTransfer):
            self.feed(ev.TransferClosed(close.key, close.strand))
        runs = self.taken(act.RunStep)
        if runs:
            # One that has ended already is late, which changes nothing.
            self.step()

    # --- the test looks ----------------------------------------------------------------------

    def taken(self, kind: type[A]) -> list[A]:
        """Every action of a kind so far."""
        return [action for action in self.actions if isinstance(action, kind)]

    def take(self, kind: type[A]) -> list[A]:
        """The same, and forget them."""
        found = self.taken(kind)
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def state(self, transfer_id: str = "t-1", attempt: int = 1) -> PrefillState:
        info = self.machine.transfer(transfer_id, attempt, self.now)
        assert info is not None
        return PrefillState(info.state)

    def fault(self, call: int) -> Fault:
        """What a call failed with."""
        (failed,) = [a for a in self.taken(act.FailCall) if a.call == call]
        return failed.fault

    def emitted(self, call: int) -> list[str]:
        """Kinds of messages a call was sent, and how it ended."""
        kinds: list[str] = []
        for action in self.actions:
            if isinstance(action, act.Emit) and action.call == call:
                kinds.append(str(action.response.WhichOneof("event")))
            elif isinstance(action, act.FinishCall) and action.call == call:
                kinds.append("OK")
            elif isinstance(action, act.FailCall) and action.call == call:
                kinds.append(action.fault.reason.name)
        return kinds

    def releases(self) -> list[tuple[str, Reason]]:
        """Where a transfer was given back, and why."""
        found = []
        for release in self.taken(act.SendRelease):
            cause = read_status(release.request.cause)
            assert isinstance(cause, Fault)
            found.append((release.endpoint, cause.reason))
        return found

    def bring_to(
        self, state: PrefillState, decodes: tuple[str, ...] = (D1,), budget_s: float = 100.0
    ) -> int:
        """A request `t-1` of two chunks in a state, by the shortest way."""
        number = self.call(tokens=12, decodes=decodes, budget_s=budget_s)
        if state is PrefillState.QUEUED:
            return number
        self.connect()
        if state is PrefillState.ALLOCATING:
            return number
        if state is PrefillState.PREPARED:
            self.occupy_pool()
        self.grant()
        if state is PrefillState.SENDING:
            self.step()
            self.step()
        assert self.state() is state
        return number

    def occupy_pool(self) -> None:
        """Let nothing be computed for want of blocks."""
        self.occupied = self.pool.reserve(self.pool.free, owner="the test")

    def free_pool(self) -> None:
        """Undo `occupy_pool`."""
        if self.occupied is not None:
            self.occupied.release()
            self.occupied = None

    def _do(self, actions: list[act.Action]) -> None:
        self.actions += actions
        self.pool.check()


def prefill_request(
    transfer_id: str = "t-1",
    tokens: int = 6,
    decodes: tuple[str, ...] = (D1,),
    attempt: int = 1,
    max_tokens: int = 16,
    generated: tuple[int, ...] = (),
    decode_name: str = "",
    **fields: object,
) -> prefill_pb2.PrefillRequest:
    request = prefill_pb2.PrefillRequest(
        ref=types_pb2.TransferRef(transfer_id=transfer_id, attempt=attempt),
        token_ids=range(3, 3 + tokens),
        generated_token_ids=generated,
        sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
        decodes=[prefill_pb2.DecodeTarget(name=decode_name, endpoint=at) for at in decodes],
    )
    request.MergeFrom(prefill_pb2.PrefillRequest(**fields))  # type: ignore[arg-type]
    return request


@pytest.fixture
def world() -> Iterator[World]:
    """A world in which, at the end, nothing is in flight and every block is free."""
    made = World()
    yield made
    settle(made)


def settle(world: World) -> None:
    """End what is left, confirm every close, and see that every block is back."""
    world.feed(ev.DrainRequested(0))
    world.advance(0.001)
    world.free_pool()
    world.confirm_closed()
    assert world.machine.transfers(world.now) == []
    assert world.pool.free == world.pool.total
    world.machine.cache.check()
    assert_whole(world.pool)
    assert world.taken(act.Drained)
