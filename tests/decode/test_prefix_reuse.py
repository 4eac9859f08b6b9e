"""What D has already it does not ask for again: rules of the machine, without an engine's bytes.

The harness's engine reads the tokens from where their KV was stored, so that an answer is right
only if every block is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode import events as ev
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request
from tests.decode.prefill_peer import Prefill

PROMPT = list(range(100, 100 + 3 * BLOCK))


def names(request: Request, salt: bytes = b"") -> list[decode_pb2.BlockHash]:
    """Of all whole blocks, as P tells them."""
    tokens = request.tokens
    found = BlockChain(BLOCK, salt).names(tokens, len(tokens) // BLOCK)
    return [decode_pb2.BlockHash(hash=name) for name in found]


def salted(salt: bytes) -> dict[str, Any]:
    return {"scope": sampling_pb2.RequestScope(cache_salt=salt)} if salt else {}


class Asker:
    """A P that names its blocks, and the client of every request."""

    def __init__(self, d: Harness, p: Prefill | None = None) -> None:
        self.d = d
        self.p = p or Prefill(d)
        self._asked = 0

    def request(self, prompt: list[int], max_tokens: int = 3, **fields: Any) -> Request:
        self._asked += 1
        return Request(f"r-{self._asked}", list(prompt), max_tokens, **fields)

    def grant(self, request: Request, salt: bytes = b"") -> decode_pb2.AllocateResponse:
        call = self.p.allocate(request, block_hashes=names(request, salt), **salted(salt))
        answer = self.d.answers[call]
        assert isinstance(answer, decode_pb2.AllocateResponse)
        return answer

    def answer(self, request: Request, salt: bytes = b"") -> decode_pb2.AllocateResponse:
        """From the Allocate to the last token; returns what was granted."""
        client = self.d.generate(request, **salted(salt))
        grant = self.grant(request, salt)
        self.d.receive(grant.grant_id, request.tokens)
        self.p.first_token(request, grant.grant_id)
        self.d.run()
        assert self.d.shown[client] == request.answer
        return grant


@pytest.fixture
def asker(d: Harness) -> Asker:
    return Asker(d)


def wanted(grant: decode_pb2.AllocateResponse) -> list[tuple[int, int]]:
    return [(run.start, run.count) for run in grant.wanted]


@pytest.mark.parametrize(
    ("prompt", "runs"),
    [
        ([7, *PROMPT[1:]], [(0, 3)]),
        ([*PROMPT[:4], 7, *PROMPT[5:]], [(1, 2)]),
        (PROMPT[:11], [(2, 1)]),
        (PROMPT, []),
        ([*PROMPT, 7], [(3, 1)]),
        (PROMPT[:8], []),
        (PROMPT[:3], [(0, 1)]),
    ],
    ids=["nothing", "part", "all but one token", "all", "one token more", "less", "no block"],
)
def test_only_what_is_missing_is_asked_for(
    asker: Asker, prompt: list[int], runs: list[tuple[int, int]]
) -> None:
    first = asker.answer(asker.request(PROMPT, max_tokens=1 + 1))
    assert wanted(first) == [(0, 3)] and first.cached_tokens == 0
    second = asker.request(prompt)
    grant = asker.answer(second)
    assert wanted(grant) == runs
    missing = sum(count for _, count in runs)
    assert grant.cached_tokens == (-(-len(prompt) // BLOCK) - missing) * BLOCK
    assert asker.d.opened[grant.grant_id].wanted == tuple(runs)


def test_whole_blocks_of_the_answer_are_found_by_who_goes_on(asker: Asker) -> None:
    first = asker.request(PROMPT, max_tokens=9)
    asker.answer(first)
    grant = asker.answer(asker.request(first.prompt + first.answer + [7]))
    # The last token of an answer has no KV: nothing was decoded after it.
    assert grant.cached_tokens == (len(PROMPT) + 8) // BLOCK * BLOCK


def test_a_hit_is_shared_and_what_follows_is_new(asker: Asker) -> None:
    d = asker.d
    first, second = asker.request(PROMPT), asker.request([*PROMPT, 9])
    d.generate(first)
    one = asker.grant(first)
    d.receive(one.grant_id, first.tokens)
    two = asker.grant(second)
    ours, theirs = d.opened[one.grant_id].blocks, d.opened[two.grant_id].blocks
    assert theirs[:3] == ours[:3] and not set(theirs[3:]) & set(ours)
    asker.p.release(first)
    d.close_receivers()
    assert d.pool.counts()[BlockState.RESERVED] == 4, "the other's share of them holds them"
    asker.p.release(second)


def test_two_at_once_take_all_and_one_copy_is_kept(asker: Asker) -> None:
    d = asker.d
    both = [asker.request(PROMPT), asker.request(PROMPT)]
    clients = [d.generate(request) for request in both]
    grants = [asker.grant(request) for request in both]
    assert [wanted(grant) for grant in grants] == [[(0, 3)], [(0, 3)]]
    for request, grant in zip(both, grants, strict=True):
        d.receive(grant.grant_id, request.tokens)
        asker.p.first_token(request, grant.grant_id)
    d.run()
    assert [d.shown[client] for client in clients] == [request.answer for request in both]
    assert d.pool.counts()[BlockState.CACHED] == 3
    assert wanted(asker.answer(asker.request(PROMPT))) == []


@pytest.mark.parametrize("end", ["corrupt", "half", "released", "lost", "first token ends it"])
def test_what_was_not_verified_to_its_end_is_never_found(asker: Asker, end: str) -> None:
    d, request = asker.d, asker.request(PROMPT)
    d.generate(request)
    grant = asker.grant(request).grant_id
    d.feed(ev.ReceiveStarted(grant))
    d.feed(ev.ReceiveProgress(grant, 1))
    if end == "corrupt":
        d.feed(ev.ReceiveFailed(grant, Fault(Reason.KV_CORRUPT, "a bit")))
    elif end == "released":
        asker.p.release(request)
    elif end == "lost":
        asker.p.says_goodbye()
        asker.p.join()
    elif end == "first token ends it":
        asker.p.first_token(request, grant, types_pb2.FINISH_REASON_STOP)
    else:
        d.advance(d.config.lease_s + 1)
        asker.p.join()
    d.close_receivers()
    assert d.pool.counts()[BlockState.CACHED] == 0
    assert wanted(asker.answer(asker.request(PROMPT))) == [(0, 3)]


def test_without_a_client_nothing_is_kept_for_what_p_alone_has_told(asker: Asker) -> None:
    d, request = asker.d, asker.request(PROMPT)
    grant = asker.grant(request).grant_id
    d.receive(grant, request.tokens)
    assert len(d.machine.ledger.cache) == 0
    client = d.generate(request)
    assert len(d.machine.ledger.cache) == 3, "its tokens name them"
    asker.p.first_token(request, grant)
    d.run()
    assert d.shown[client] == request.answer


@pytest.mark.parametrize("client_first", [True, False])
def test_hashes_of_another_prompt_end_both_legs_before_a_token(
    asker: Asker, client_first: bool
) -> None:
    """A P that is wrong about its prompt would be granted another's KV."""
    d = asker.d
    asker.answer(asker.request(PROMPT))
    request = asker.request([5, *PROMPT[1:]])
    wrong = names(asker.request(PROMPT))
    client = d.generate(request) if client_first else 0
    call = asker.p.allocate(request, block_hashes=wrong)
    if not client_first:
        assert wanted(d.answers[call]) == []
        client = d.generate(request)
        assert [e.ref.transfer_id for e in d.ended_for(asker.p.stream)] == [request.transfer_id]
    else:
        assert d.reason(call) is Reason.HANDOFF_MISMATCH
    assert d.refused[client].metadata["part"] == "block_hashes"
    d.close_receivers()


@pytest.mark.parametrize("salt", [b"", b"a", b"b"])
def test_another_salt_never_hits(asker: Asker, salt: bytes) -> None:
    asker.answer(asker.request(PROMPT), b"a")
    grant = asker.answer(asker.request(PROMPT), salt)
    assert wanted(grant) == ([] if salt == b"a" else [(0, 3)])


def test_legs_of_different_salts_do_not_mean_the_same_request(asker: Asker) -> None:
    d, request = asker.d, asker.request(PROMPT)
    client = d.generate(request, **salted(b"a"))
    call = asker.p.allocate(request, block_hashes=names(request, b"b"), **salted(b"b"))
    assert d.reason(call) is Reason.HANDOFF_MISMATCH
    assert d.refused[client].metadata["part"] == "scope.cache_salt"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"block_hashes": [decode_pb2.BlockHash(hash=b"h" * 16)] * 4}, "block_hashes"),
        ({"block_hashes": [decode_pb2.BlockHash(hash=b"h" * 15)]}, "block_hashes"),
        ({"scope": sampling_pb2.RequestScope(cache_salt=b"s" * 65)}, "scope.cache_salt"),
    ],
)
def test_names_and_salts_of_another_shape_are_refused(
    d: Harness, p: Prefill, fields: dict[str, Any], path: str
) -> None:
    call = p.allocate(Request(prompt=PROMPT), **fields)
    assert [field.field for field in d.refused[call].fields] == [path]


@pytest.mark.parametrize("known", [True, False])
def test_a_name_told_twice_is_refused_and_takes_nothing(asker: Asker, known: bool) -> None:
    d = asker.d
    if known:
        asker.answer(asker.request(PROMPT))
    request = asker.request(PROMPT)
    first = names(request)[0]
    call = asker.p.allocate(request, block_hashes=[first, first])
    assert d.reason(call) is Reason.BAD_REQUEST
    assert [field.field for field in d.refused[call].fields] == ["block_hashes"]
    assert wanted(asker.answer(request)) == ([] if known else [(0, 3)])


def test_hashes_are_a_part_of_the_body(asker: Asker) -> None:
    request = asker.request(PROMPT)
    asker.grant(request)
    call = asker.p.allocate(request)
    assert asker.d.reason(call) is Reason.DUPLICATE_TRANSFER
    asker.p.release(request)


def test_a_repeated_allocate_wants_the_same_though_more_is_known_by_then(asker: Asker) -> None:
    d = asker.d
    first, second = asker.request(PROMPT), asker.request(PROMPT)
    granted = asker.grant(second)
    asker.answer(first)
    assert asker.grant(second) == granted
    assert wanted(granted) == [(0, 3)]
    asker.p.release(second)
    d.close_receivers()


def test_one_that_waits_is_granted_with_what_is_known_when_its_turn_comes(asker: Asker) -> None:
    d = asker.d
    hog = asker.request(list(range(500, 500 + 10 * BLOCK)))
    held = asker.grant(hog)
    first = asker.request(PROMPT[:8], max_tokens=2)
    client = d.generate(first)
    one = asker.grant(first)
    waits = asker.request(PROMPT)
    call = asker.p.allocate(waits, block_hashes=names(waits))
    assert call not in d.answers and d.state(waits.transfer_id) is S.WAITING
    d.receive(one.grant_id, first.tokens)
    assert wanted(d.answers[call]) == [(2, 1)], "two of its four blocks are shared, two were free"
    asker.p.first_token(first, one.grant_id)
    d.run()
    assert d.shown[client] == first.answer
    for request in (hog, waits):
        asker.p.release(request)
    d.close_receivers()
    assert held.cached_tokens == 0


def test_what_d_prefills_itself_uses_and_feeds_the_same_cache(asker: Asker) -> None:
    d = asker.d
    request = asker.request(PROMPT)
    local = d.generate(request, local=True)
    d.run()
    assert d.shown[local] == request.answer
    assert wanted(asker.answer(asker.request(PROMPT))) == []
    d.steps.clear()
    again = d.generate(asker.request(PROMPT), local=True)
    d.run()
    (chunk,) = [chunk for plan in d.steps for chunk in plan.prefill]
    assert (chunk.start, len(chunk.token_ids)) == (2 * BLOCK, BLOCK), "the last token is computed"
    assert d.shown[again] == request.answer
    assert d.finished[again].usage.cached_tokens == 2 * BLOCK
    assert d.finished[local].usage.cached_tokens == 0


@pytest.mark.parametrize("computed", [0, 4, 12])
def test_usage_says_what_p_did_not_compute(asker: Asker, computed: int) -> None:
    d, request = asker.d, asker.request(PROMPT)
    client = d.generate(request)
    grant = asker.grant(request).grant_id
    d.receive(grant, request.tokens)
    message = asker.p.first_token_request(request, grant)
    message.computed_tokens = computed
    d.feed(ev.FirstTokenCalled(d.number(), message))
    d.run()
    # A P that says nothing is not taken for one that computed nothing.
    assert d.finished[client].usage.cached_tokens == (12 - computed if computed else 0)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    d = Harness(num_blocks=9)
    asker = Asker(d)
    old, young = (asker.request([start] * 4, max_tokens=20) for start in (100, 200))
    clients = [d.generate(request) for request in (old, young)]
    for request in (old, young):
        grant = asker.grant(request).grant_id
        d.receive(grant, request.tokens)
        asker.p.first_token(request, grant)
        d.now += 0.001
    d.run()
    assert S.PREEMPTED in d.path(young.transfer_id)
    again = [chunk for plan in d.steps for chunk in plan.prefill]
    assert again and all(chunk.start > 0 for chunk in again), "nothing from the beginning"
    assert [d.shown[client] for client in clients] == [old.answer, young.answer]
    d.all_returned()


def test_switched_off_nothing_is_kept() -> None:
    d = Harness(prefix_cache=0.0)
    asker = Asker(d)
    for _ in range(2):
        grant = asker.answer(asker.request(PROMPT))
        assert wanted(grant) == [(0, 3)] and grant.cached_tokens == 0
        assert d.pool.counts()[BlockState.FREE] == d.pool.total
    d.all_returned()


def test_a_restarted_d_knows_nothing(asker: Asker) -> None:
    asker.answer(asker.request(PROMPT))
    d = Harness()
    assert wanted(Asker(d).answer(Request("r-1", PROMPT, 3))) == [(0, 3)]
    d.all_returned()


@given(
    seed=st.randoms(use_true_random=False),
    blocks=st.integers(9, 20),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_prompts_that_begin_alike_are_answered_right_in_a_small_pool(
    seed: Any, blocks: int, share: float
) -> None:
    """Several requests at once, P's and D's own, under eviction and preemption."""
    d = Harness(num_blocks=blocks, prefix_cache=share)
    asker = Asker(d)
    todo = []
    for _ in range(12):
        prompt = [seed.choice((11, 12)) for _ in range(seed.randint(1, 14))]
        todo.append(asker.request([9] * 4 + prompt, max_tokens=seed.randint(2, 12)))
    clients: dict[int, Request] = {}
    granted: dict[str, Request] = {}
    calls: dict[int, Request] = {}
    for _ in range(2000):
        ready = [c for c in calls if c in d.answers]
        moves = ["ask"] * bool(todo) + ["step"] * (d.step is not None)
        moves += ["receive"] * bool(ready) + ["token"] * bool(granted)
        if not moves:
            break
        move = seed.choice(moves)
        if move == "ask":
            request = todo.pop()
            if seed.random() < 0.3:
                clients[d.generate(request, local=True)] = request
            else:
                clients[d.generate(request)] = request
                calls[asker.p.allocate(request, block_hashes=names(request))] = request
        elif move == "receive":
            call = seed.choice(ready)
            request = calls.pop(call)
            grant = d.answers[call].grant_id
            d.receive(grant, request.tokens)
            granted[grant] = request
        elif move == "token":
            grant = seed.choice(sorted(granted))
            asker.p.first_token(granted.pop(grant), grant)
        else:
            d.run_step()
        d.now += 0.0001
    assert not (todo or calls or granted)
    for client, request in clients.items():
        assert d.shown[client] == request.answer, replace(request)
    d.all_returned()
