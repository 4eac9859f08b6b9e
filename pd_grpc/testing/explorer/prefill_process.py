"""A P of the world: the real machine and sender, an engine that writes tags, and their shell."""

from __future__ import annotations

from typing import Any

from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.carriers import INLINE_ALONE, Carriers
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.requests import Timer
from pd_grpc.prefill.sessions import Phase
from pd_grpc.prefill.states import TRANSITIONS, PrefillState
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Code, TransportFault
from pd_grpc.testing.explorer.borrowing import SHM, Handshake, Reached, Reaching, welcome_of
from pd_grpc.testing.explorer.computing import ComputingProcess
from pd_grpc.testing.explorer.kv import TOKENIZER, UNCUT, Cut, limits
from pd_grpc.testing.explorer.process import Input, Looks, server_of
from pd_grpc.testing.explorer.wire import BROKEN, CANCEL, END, Interned, Message
from pd_grpc.v1 import decode_pb2, types_pb2

_LATE = TransportFault(Code.DEADLINE_EXCEEDED, "the call's time is over")
_SILENT = TransportFault(Code.DEADLINE_EXCEEDED, "the shard acknowledged nothing")
_EARLY = (PrefillState.QUEUED, PrefillState.ALLOCATING, PrefillState.PREPARED)


class PrefillProcess(ComputingProcess):
    """One P."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        config: PrefillConfig,
        fine: bool,
        carriers: Carriers = INLINE_ALONE,
        known_as: tuple[str, int] | None = None,
        cut: Cut = UNCUT,
    ) -> None:
        """`known_as` are its name and epoch, where they are not those that the world knows."""
        super().__init__(name, epoch, ids, config, fine, known_as or (name, epoch), cut)
        name, epoch = self.known_as
        instance = types_pb2.Instance(name=name, epoch=epoch, role=types_pb2.ROLE_PREFILL)
        self.machine = PrefillMachine(
            config, instance, limits(config.num_blocks, cut), self.pool, TOKENIZER, carriers
        )
        self.reaching: dict[int, Reaching] = {}
        """Sessions whose welcome the machine has yet to hear, for D's memory is not here."""
        self.calls: set[int] = set()
        self.sessions: dict[int, tuple[str, int]] = {}
        self.allocates: dict[int, tuple[act.SendAllocate, float]] = {}
        self.first_tokens: dict[int, tuple[act.SendFirstToken, float]] = {}
        self.releases: dict[int, tuple[act.SendRelease, float]] = {}

    # --- what others see -------------------------------------------------------------------------

    def looks(self) -> Looks:
        """See `Process.looks`."""
        machine, requests = self.machine, self.machine.requests
        steps = []
        if (at := machine.next_wake()) is not None and at <= self.now:
            steps.append("tick")
        if any(at <= self.now for at in self._deadlines()):
            steps.append("expire")
        if self.run is not None:
            steps.append("step")
        if self.write is not None:
            steps.append("land")
        steps += self._posted() + ["goodbye"] * self._may_leave()
        idle = not (steps or requests.in_flight or requests._lingering or self.sendings)
        settled = idle and not len(machine.placement.releases)
        wake_s = self._wake_s(machine.next_wake(), *self._deadlines())
        facts, writes = self._facts(), self.writes()
        may_drain, rows = self.kept is None, self._rows()
        return Looks(tuple(steps), wake_s, settled, facts, may_drain, writes=writes, rows=rows)

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        found = [f"{key} is in flight" for key in self.machine.requests.in_flight]
        found += [f"{key} lingers" for key in self.machine.requests._lingering]
        found += [f"{len(self.machine.placement.releases)} releases"] * bool(
            len(self.machine.placement.releases)
        )
        if self.pool.free != self.pool.total:
            found.append(f"blocks {self.pool.holdings()}")
        pool = self.machine.placement.pool
        if pool.in_flight or pool.granted or self.calls or self.sendings:
            found.append(f"{pool.in_flight} asks, {pool.granted} grants, {len(self.calls)} calls")
        return [f"{self.name}: {each}" for each in found]

    def _facts(self) -> Any:
        conversations, requests = self.machine.conversations, self.machine.requests
        flying = []
        for key, record in requests.in_flight.items():
            endpoint = record.target.endpoint
            session = conversations.get(endpoint)
            there = session is not None and session.phase is Phase.OPEN
            timers = [Timer("first_token", key)]
            timers += [Timer("reopen", key, shard) for shard in record.streams]
            again = any(requests.timers.at(timer) is not None for timer in timers)
            grant = record.grant
            flying.append(
                (
                    key,
                    record.call,
                    server_of(endpoint),
                    0 if grant is None else grant.decode.epoch,
                    record.asking,
                    there and not again,
                )
            )
        owed = frozenset(
            (server_of(o.endpoint), o.key) for o in self.machine.placement.releases._owed
        )
        return tuple(flying), owed, self.known_as[1], frozenset(self.calls)

    def _may_leave(self) -> bool:
        """Whether it has drained, and no step or call is under way."""
        under_way = self.run is not None or bool(self.first_tokens or self.releases)
        return self.drained and not under_way

    def _serves(self) -> bool:
        return not self.machine.draining and self.machine.stuck is None

    def _deadlines(self) -> list[float]:
        calls = (self.allocates, self.first_tokens, self.releases)
        known = [at for group in calls for _, at in group.values()]
        known += [reaching.until for reaching in self.reaching.values()]
        if self.write is not None:
            return known  # The bulk loop is busy.
        stalls = [sending.sender.deadline() for sending in self.sendings.values()]
        return known + [at for at in stalls if at is not None]

    # --- what happens ----------------------------------------------------------------------------

    def _happen(self, happens: Input) -> None:
        kind = happens[0]
        if kind == "up" and self._asked_by_router(happens[1], self._ids.messages[happens[2]]):
            return
        if kind == "up":
            self._called(happens[1], self._ids.messages[happens[2]])
        elif kind == "down":
            self._answered(happens[1], self._ids.messages[happens[2]])
        elif kind == "tick":
            self._perform(self.machine.tick(self.now))
        elif kind == "expire":
            self._expire()
        elif kind in ("step", "spoil"):
            self._step(*happens[1:])
        elif kind == "poison":
            self.poisoned.add(happens[1])
            self._step()
        elif kind == "land":
            self._land()
        elif kind == "drain":
            self.kept = frozenset(self.machine.requests.in_flight)
            self._feed(ev.DrainRequested(self.config.drain_s))
        elif kind == "goodbye":
            self.drained = False
            self._perform(self.machine.leave(self.now))
        elif kind == "fail":
            self._raise()
        else:
            self._take_posted(kind)

    def _called(self, call: int, message: Message) -> None:
        if message.kind == CANCEL:
            self.calls.discard(call)
            self._feed(ev.PrefillCallEnded(call))
        else:
            request, budget_s = message.body
            self.calls.add(call)
            left_s = max(0.0, budget_s - self.config.hop_margin_s)
            self._feed(ev.PrefillCalled(call, request, left_s))

    def _answered(self, call: int, message: Message) -> None:
        fault = message.body if message.kind in (END, BROKEN) else None
        if call in self.sessions:
            self._said(call, message)
        elif call in self.allocates:
            asked, _ = self.allocates.pop(call)
            response = None if fault is not None else message.body
            self._feed(ev.AllocateAnswered(asked, response, fault))
        elif call in self.first_tokens:
            first, _ = self.first_tokens.pop(call)
            state = None if fault is not None else message.body.state
            self._feed(ev.FirstTokenAnswered(first.key, first.attempt, state, fault))
        elif call in self.releases:
            release, _ = self.releases.pop(call)
            self._feed(ev.ReleaseAnswered(release, fault))
        else:
            self._stream(call, message)

    def _said(self, call: int, message: Message) -> None:
        """A D says something on a session; nothing of it is heard before its welcome is."""
        endpoint, link = self.sessions[call]
        if call in self.reaching:
            self.reaching[call].held.append(message)
        elif message.kind in (END, BROKEN):
            del self.sessions[call]
            self._feed(ev.SessionBroken(endpoint, link, message.body))
        elif (welcome := welcome_of(message)) is not None:
            until = self.now + self.config.connect_s / 2
            self.reaching[call] = Reaching(message, until)
            server = self._ids.calls[call].server
            self.to_bulk.append(Handshake(call, server, welcome.instance.epoch))
        else:
            self._feed(ev.SessionMessage(endpoint, link, message.body))

    def _waits(self, session: int) -> bool:
        return session in self.reaching

    def _reached(self, session: int, got_there: bool) -> None:
        reaching = self.reaching.pop(session, None)
        if reaching is None:
            return
        endpoint, link = self.sessions[session]
        if not got_there:
            self._give_up(session)
            self._cancel(session)
            del self.sessions[session]
            self._feed(ev.TransportFailed(endpoint, link, SHM, "no shared memory"))
            return
        self._feed(ev.SessionMessage(endpoint, link, reaching.welcome.body))
        for message in reaching.held:
            if session in self.sessions:
                self._said(session, message)

    def _expire(self) -> None:
        for call, (asked, at) in list(self.allocates.items()):
            if at <= self.now:
                del self.allocates[call]
                self._cancel(call)
                self._feed(ev.AllocateAnswered(asked, None, _LATE))
        for call, (first, at) in list(self.first_tokens.items()):
            if at <= self.now:
                del self.first_tokens[call]
                self._cancel(call)
                self._feed(ev.FirstTokenAnswered(first.key, first.attempt, None, _LATE))
        for call, (release, at) in list(self.releases.items()):
            if at <= self.now:
                del self.releases[call]
                self._cancel(call)
                self._feed(ev.ReleaseAnswered(release, _LATE))
        for session, reaching in list(self.reaching.items()):
            if reaching.until <= self.now:
                self._reached(session, False)
        for (key, shard), sending in self.sendings.items():
            until = sending.sender.deadline() if self.write is None else None
            if until is not None and until <= self.now:
                if sending.call is not None:
                    self._cancel(sending.call)
                self._stream_broken(key, shard, sending, _SILENT)

    # --- what it does ----------------------------------------------------------------------------

    def _feed(self, event: ev.Event | Reached) -> None:
        if isinstance(event, Reached):
            self._reached(*event)
            return
        self._perform(self.machine.handle(event, self.now))

    def _perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Emit):
                if action.call in self.calls:
                    self._down(action.call, "prefill", action.response)
            elif isinstance(action, act.FinishCall | act.FailCall):
                if action.call in self.calls:
                    self.calls.remove(action.call)
                    self._end(action.call, getattr(action, "fault", None))
                    self.news.append(ev.PrefillCallEnded(action.call))
            elif isinstance(action, act.OpenTransfer | act.CloseTransfer | act.ForgetDecode):
                self.to_bulk.append(action)
            elif isinstance(action, act.RunStep):
                self._take_run(action)
            elif isinstance(action, act.Drained):
                self.drained = True
            elif isinstance(action, act.Changed):
                self._note(action)
            else:
                self._to_decode(action)

    def _to_decode(self, action: act.Action) -> None:
        if isinstance(action, act.OpenSession):
            server, name = server_of(action.endpoint), str(action.link)
            call = self._open("session", server, name, "hello", action.hello)
            self.sessions[call] = (action.endpoint, action.link)
        elif isinstance(action, act.SendOnSession):
            for call in self._session(action.endpoint, action.link):
                self._say(call, action.message)
        elif isinstance(action, act.CloseSession):
            for call in self._session(action.endpoint, action.link):
                del self.sessions[call]
                if self.reaching.pop(call, None) is not None:
                    self._give_up(call)
                (self._close if action.graceful else self._cancel)(call)
        elif isinstance(action, act.SendAllocate):
            body = (action.request, round(action.timeout_s, 6))
            name = f"{action.key}/{action.ask}"
            call = self._open("allocate", server_of(action.endpoint), name, "allocate", body)
            self.allocates[call] = (action, self.now + action.timeout_s)
        elif isinstance(action, act.CancelAllocate):
            for call, (asked, _) in list(self.allocates.items()):
                if (asked.key, asked.ask) == (action.key, action.ask):
                    del self.allocates[call]
                    self._cancel(call)
        elif isinstance(action, act.SendFirstToken):
            name = f"{action.key}/{action.attempt}"
            server = server_of(action.endpoint)
            call = self._open("first", server, name, "first", action.request)
            self.first_tokens[call] = (action, self.now + action.timeout_s)
        elif isinstance(action, act.SendRelease):
            name = f"{action.key}/{action.call}"
            server = server_of(action.endpoint)
            call = self._open("release", server, name, "release", action.request)
            self.releases[call] = (action, self.now + action.timeout_s)

    def _say(self, call: int, message: decode_pb2.SessionRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            # Its number is an echo for people.
            who = self._ids.calls[call].server
            flying = self.machine.requests.in_flight.values()
            held = {r.grant.grant_id for r in flying if r.grant and r.grant.decode.name == who}
            if not held <= set(message.heartbeat.grant_ids):
                self._wrong("a heartbeat lists what is held", str(sorted(held)))
            beat = decode_pb2.Heartbeat(grant_ids=message.heartbeat.grant_ids)
            message = decode_pb2.SessionRequest(heartbeat=beat)
        self._up(call, "session", message)

    def _session(self, endpoint: str, link: int) -> list[int]:
        return [call for call, known in self.sessions.items() if known == (endpoint, link)]

    def _note(self, change: act.Changed) -> None:
        if change.before is not None and change.after not in TRANSITIONS[change.before]:
            self._wrong(
                "terminal states absorb",
                f"{change.key} went from {change.before.name} to {change.after.name}",
            )

    # --- what must hold --------------------------------------------------------------------------

    def _check(self) -> None:
        self.pool.check()
        self.machine.cache.check()
        requests = self.machine.requests
        self._check_drain(requests.in_flight)
        for key, record in requests.in_flight.items():
            if record.state in _EARLY and record.holding is not None:
                self._wrong("no hold and wait", f"{key} holds blocks in {record.state.name}")
            if requests.timers.at(Timer("budget", key)) is None:
                self._wrong("no state without a timer", f"{key} in {record.state.name}")
            if record.state.terminal:
                self._wrong("terminal states absorb", f"{key} is in flight and has ended")
        for (key, _), sending in self.sendings.items():
            owner = requests.get(key)
            holding = None if owner is None else owner.holding
            if holding is None or tuple(holding.blocks) != sending.sender.plan.block_table:
                self._wrong("no block is free while it may be read", f"{key} is being sent")
        held = {id(record.holding) for record in requests.in_flight.values()}
        held |= {id(record.holding) for record in requests._lingering.values()}
        if any(id(holding) not in held for holding in self.pool.holdings()):
            self._wrong("conservation", f"nobody has {self.pool.holdings()}")
