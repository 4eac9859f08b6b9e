"""Whatever happens in whatever order: no block is lost, nothing hangs, no wrong token is shown.

A walk of a few hundred events drawn at random, those that lead on more often than those that end
something. What a seed does is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from pd_grpc.decode import events as ev
from pd_grpc.decode.states import TRANSITIONS
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Fault, Reason
from tests.decode.harness import Harness
from tests.decode.messages import Request
from tests.decode.prefill_peer import Prefill

POOL = 9
PROMPTS = ([100, 101], list(range(110, 118)), list(range(120, 135)))
EVENTS = 300
SEEDS = 30


class AnyOrder:
    """Two Ps, clients, an engine and a receiver, each doing what it may and what it may not."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.d = Harness(
            num_blocks=POOL, allocate_queue=3, chunk_tokens=4, prefill_batch=2, max_batch=3
        )
        self.d.holds_closes = True
        self.ps = [Prefill(self.d, name) for name in ("p0", "p1")]
        self.grants: dict[str, tuple[Prefill, Request]] = {}
        self.allocates: dict[int, tuple[Prefill, Request]] = {}
        self.clients: dict[int, Request] = {}
        self.transfers = 4
        self.moves: set[tuple[S | None, S]] = set()
        self.rules: dict[Callable[[], None], int] = {
            self.begin: 8,
            self.hand_over: 12,
            self.a_step_returns: 50,
            self.allocate: 6,
            self.an_allocate_ends: 3,
            self.first_token: 4,
            self.release: 1,
            self.a_session_breaks: 1,
            self.a_prefill_joins: 2,
            self.a_prefill_restarts: 1,
            self.goodbye: 1,
            self.heartbeat: 6,
            self.generate: 6,
            self.a_client_leaves: 1,
            self.kv: 4,
            self.receivers_close: 4,
            self.time_passes: 8,
            self.an_operator_releases: 1,
        }

    def walk(self) -> None:
        """What the seed says, and then everybody leaves."""
        rules = self.random.choices(list(self.rules), list(self.rules.values()), k=EVENTS)
        for happens in rules:
            happens()
            self.clients_see_only_what_is_right()
            self.every_move_is_in_the_table()
        self.everybody_leaves()
        self.d.all_returned()

    def request(self, attempt: int = 0) -> Request:
        """One of those in flight, now and then a new one; the same ref may mean two requests."""
        if self.random.random() < 0.2:
            self.transfers += 1
        i = self.random.randrange(self.transfers - 4, self.transfers)
        prompt = PROMPTS[(i + (self.random.random() < 0.05)) % len(PROMPTS)]
        attempt = attempt or self.random.choice([1, 1, 1, 1, 2])
        return Request(f"t-{i}", prompt, max_tokens=(1, 6, 14)[i % 3], attempt=attempt)

    def one_p(self) -> Prefill:
        return self.random.choice(self.ps)

    def one_grant(self) -> tuple[str, Prefill, Request]:
        for call in [c for c in self.allocates if c in self.d.answers]:
            self.grants[self.d.answers[call].grant_id] = self.allocates.pop(call)
        if not self.grants:
            return "g-none", self.one_p(), self.request()
        grant = self.random.choice(list(self.grants)[-8:])
        return grant, *self.grants[grant]

    # P

    def begin(self) -> None:
        """Both legs of one request, in either order."""
        request, p = self.request(1), self.one_p()
        if self.random.random() < 0.5:
            self.generate(request)
            self.allocate(request, p)
        else:
            self.allocate(request, p)
            self.generate(request)

    def allocate(self, request: Request | None = None, p: Prefill | None = None) -> None:
        request, p = request or self.request(), p or self.one_p()
        wait_s = self.random.choice([0.0, 2.0, 20.0])
        needed = request.max_tokens > 1 or self.random.random() < 0.5
        call = p.allocate(request, kv_needed=needed, max_wait_s=wait_s, budget_s=60.0)
        self.allocates[call] = (p, request)

    def an_allocate_ends(self) -> None:
        settled = {*self.d.answers, *self.d.refused}
        waiting = [call for call in self.allocates if call not in settled]
        if waiting:
            self.d.end_allocate(self.random.choice(waiting))

    def first_token(self) -> None:
        grant, p, request = self.one_grant()
        sender = self.random.choice([p, p, p, self.one_p()])
        sender.first_token(request, grant, self.random.choice([0, 0, 0, 0, 1, 2, 7]))

    def hand_over(self) -> None:
        """The way that leads somewhere."""
        grant, p, request = self.one_grant()
        if grant in self.d.opened and grant not in self.d.closes:
            self.d.receive(grant, request.tokens)
            p.first_token(request, grant)

    def release(self) -> None:
        cause = self.random.choice([None, Fault(Reason.ENGINE_ERROR, "the prefill failed")])
        self.one_p().release(self.request(), cause)

    def a_session_breaks(self) -> None:
        self.one_p().breaks()

    def a_prefill_joins(self) -> None:
        self.one_p().join()

    def a_prefill_restarts(self) -> None:
        p = self.one_p()
        before, session = p.epoch, p.session_id
        p.epoch += self.random.choice([1, -1])
        p.join()
        if p.session_id == session:
            p.epoch = before

    def goodbye(self) -> None:
        self.one_p().says_goodbye()

    def heartbeat(self) -> None:
        """Some grants are never listed, and one of anybody's or nobody's is now and then."""
        more = [self.one_grant()[0]] if self.random.random() < 0.3 else []
        for p in self.ps:
            mine = [g for g, (owner, _) in self.grants.items() if owner is p]
            p.beat(*(g for g in mine if int(g.split("-")[1]) % 3), *more)

    # Clients

    def generate(self, request: Request | None = None) -> None:
        request = request or self.request()
        local = self.random.random() < 0.1
        self.clients[self.d.generate(request, budget_s=60.0, local=local)] = request

    def a_client_leaves(self) -> None:
        if self.clients:
            self.d.leave(self.random.choice(list(self.clients)))

    # Receiver and engine

    def kv(self) -> None:
        grant, _, request = self.one_grant()
        what = self.random.choice(["started", "progress", "completed", "failed"])
        if what == "started":
            self.d.feed(ev.ReceiveStarted(grant))
        elif what == "progress":
            self.d.feed(ev.ReceiveProgress(grant, 1))
        elif what == "failed":
            self.d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "wrong")))
        elif grant in self.d.opened:
            self.d.complete(grant, request.tokens)

    def receivers_close(self) -> None:
        self.d.close_receivers()

    def a_step_returns(self) -> None:
        if self.d.step is None:
            return
        if self.random.random() < 0.03:
            self.d.fail_step(Fault(Reason.ENGINE_ERROR, "the engine raised"))
        else:
            self.d.run_step()

    # Time and operators

    def time_passes(self) -> None:
        self.d.advance(self.random.choice([0.01, 0.05, 0.5, 0.5, 2.0, 4.0, 6.0, 30.0]))

    def an_operator_releases(self) -> None:
        request = self.request()
        attempt = self.random.choice([0, request.attempt])
        self.d.feed(ev.OperatorReleased(request.transfer_id, attempt, "by hand"))

    # What must hold

    def clients_see_only_what_is_right(self) -> None:
        for call, request in self.clients.items():
            shown = self.d.shown.get(call, [])
            assert shown == request.answer[: len(shown)]
            assert call not in self.d.finished or shown

    def every_move_is_in_the_table(self) -> None:
        for change in self.d.changes:
            self.moves.add((change.before, change.after))
            dropped = change.fault is None and change.after.terminal
            assert change.before is None or dropped or change.after in TRANSITIONS[change.before]
        self.d.changes.clear()

    def everybody_leaves(self) -> None:
        for call in self.clients:
            self.d.leave(call)
        for p in self.ps:
            p.breaks()
        self.d.advance(self.d.config.grace_s + self.d.config.attach_s)
        while self.d.step is not None:
            self.d.run_step()
        self.d.close_receivers()


@cache
def walked(seed: int) -> frozenset[tuple[S | None, S]]:
    """The moves that a seed's walk made."""
    walker = AnyOrder(seed)
    walker.walk()
    return frozenset(walker.moves)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_events_ends_well(seed: int) -> None:
    assert (None, S.EXPECTED) in walked(seed)


def test_the_walks_go_everywhere() -> None:
    moves = {move for seed in range(SEEDS) for move in walked(seed)}
    lead_on = {(a, b) for a, after in TRANSITIONS.items() for b in after if not b.terminal}
    assert lead_on <= moves
    assert {b for _, b in moves} == set(S)
