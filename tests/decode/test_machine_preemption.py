"""Whom D puts aside when it is out of blocks: its youngest request, whatever that does."""

from __future__ import annotations

from random import Random

import pytest

from pd_grpc.decode.events import GenerateCallEnded
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Reason
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request
from tests.decode.prefill_peer import Prefill

OLD = Request("t-old", prompt=[30], max_tokens=20, request_id="old")
YOUNG = Request("t-young", prompt=list(range(100, 100 + 8 * BLOCK)), max_tokens=6, request_id="y")


def key_of(d: Harness, call: int) -> str:
    transfer = d.machine.ledger.of_call(call)
    assert transfer is not None
    return transfer.key.transfer_id


def put_aside(handed_over: bool = False, prefix_cache: float = 1.0) -> tuple[Harness, int, int]:
    """A D whose old request, which decodes, has just taken the blocks of the young one, whose
    prompt was not yet computed; and the two calls. Ten blocks: nine for the young, one for the
    old, which soon needs a second one."""
    d = Harness(num_blocks=10, chunk_tokens=BLOCK, prefix_cache=prefix_cache)
    old = d.generate(OLD, local=not handed_over)
    if handed_over:
        Prefill(d).hand_off(OLD)
    d.advance(0.01)
    while old not in d.shown:
        d.run_step()
    young = d.generate(YOUNG, local=True)
    name = key_of(d, young)
    while d.state(name) is not S.PREEMPTED:
        assert len(d.shown[old]) < 5, "the old one must have needed a block"
        d.run_step()
    return d, old, young


def answers_are_right(d: Harness, old: int, young: int) -> None:
    d.run()
    assert (d.shown[old], d.shown[young]) == (OLD.answer, YOUNG.answer)
    d.all_returned()


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("prefix_cache", [0.0, 1.0])
def test_a_prompt_in_prefill_gives_way_to_an_older_one_that_decodes(
    handed_over: bool, prefix_cache: float
) -> None:
    """F29, invariant 10."""
    d, old, young = put_aside(handed_over, prefix_cache=prefix_cache)
    name, of_old = key_of(d, young), key_of(d, old)
    waits = d.transfer(name)
    assert waits.holding is None and waits.kv_tokens == 0 and young not in d.shown
    answers_are_right(d, old, young)
    assert S.PREEMPTED not in d.path(of_old), "the oldest always goes on"
    assert d.path(name)[-4:] == [S.RECEIVING, S.PREEMPTED, S.DECODING, S.FINISHED]
    assert d.finished[young].timings is not None


def test_what_was_computed_of_it_is_found_again_if_it_is_kept() -> None:
    computed = {}
    for share in (0.0, 1.0):
        d, old, young = put_aside(prefix_cache=share)
        answers_are_right(d, old, young)
        chunks = [c for plan in d.steps for c in plan.prefill if c.token_ids[0] >= 100]
        computed[share] = sum(len(c.token_ids) for c in chunks)
    assert len(YOUNG.prompt) <= computed[1.0] < computed[0.0]


def test_it_goes_ahead_of_those_that_wait_for_blocks() -> None:
    d, old, young = put_aside()
    p = Prefill(d)
    call = p.allocate(Request("t-next"))
    later = d.generate(Request("t-later", prompt=[8, 9], request_id="later"), local=True)
    while d.transfer(key_of(d, young)).holding is None:
        assert call not in d.answers and d.state(key_of(d, later)) is S.WAITING
        d.run_step()
    d.run()
    p.release(Request("t-next"))
    answers_are_right(d, old, young)


def test_an_older_prompt_does_not_give_way_to_a_younger_one_that_decodes() -> None:
    d = Harness(num_blocks=10, chunk_tokens=BLOCK)
    p = Prefill(d)
    long = d.generate(YOUNG, local=True)
    d.advance(0.01)
    short = d.generate(OLD)
    p.hand_off(OLD)
    d.run()
    assert S.PREEMPTED in d.path(OLD.transfer_id)
    assert {c.key.transfer_id for c in d.changes if c.after is S.PREEMPTED} == {OLD.transfer_id}
    assert (d.shown[long], d.shown[short]) == (YOUNG.answer, OLD.answer)
    d.all_returned()


@pytest.mark.parametrize("computing", [False, True])
def test_its_client_may_leave(computing: bool) -> None:
    d, old, young = put_aside()
    while computing and d.transfer(key_of(d, young)).holding is None:
        d.run_step()
    d.feed(GenerateCallEnded(young))
    d.run()
    assert d.shown[old] == OLD.answer
    d.all_returned()


def test_its_time_ends_in_the_stage_prefill() -> None:
    d, _, young = put_aside()
    d.advance(200.0)
    assert d.reason(young) is Reason.STAGE_DEADLINE
    assert d.refused[young].metadata == {"stage": "prefill"}
    d.run_step()
    d.all_returned()


def test_once_it_has_begun_to_decode_its_time_ends_in_the_stage_decode() -> None:
    d, _, young = put_aside()
    while young not in d.shown:
        d.run_step()
    d.advance(200.0)
    assert d.refused[young].metadata == {"stage": "decode"}
    d.run_step()
    d.all_returned()


class Youngest(Harness):
    """Sees that whoever is put aside is the youngest of those whose blocks D may take."""

    def check(self) -> None:
        super().check()
        alive = self.machine.ledger.transfers.values()
        aside = [t.turn for t in alive if t.state is S.PREEMPTED and t.holding is None]
        decoding = [t.turn for t in alive if t.state is S.DECODING]
        prefilling = [t.turn for t in alive if t.local and t.state is S.RECEIVING]
        again = [t.turn for t in alive if t.state is S.PREEMPTED and t.holding is not None]
        if aside:
            # Nothing is granted meanwhile, and they come back oldest first.
            assert min(aside) > max([*decoding, *prefilling, *again], default=0)


@pytest.mark.parametrize("prefix_cache", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_under_any_load_the_youngest_is_put_aside_and_all_are_answered(
    seed: int, prefix_cache: float
) -> None:
    random = Random(seed)
    d = Youngest(num_blocks=16, max_batch=4, prefix_cache=prefix_cache)
    p = Prefill(d)
    asked: dict[int, Request] = {}
    for i in range(40):
        prompt = [random.randrange(10, 900) for _ in range(random.choice((2, 9, 30, 45)))]
        request = Request(f"t-{i}", prompt, max_tokens=random.randrange(2, 15))
        local = random.random() < 0.7
        asked[d.generate(request, local=local)] = request
        if not local:
            allocate = p.allocate(request)
            while allocate not in d.answers:
                d.run_step()
            grant = str(d.answers[allocate].grant_id)
            d.receive(grant, request.tokens)
            p.first_token(request, grant)
        for _ in range(random.randrange(4)):
            if d.step is not None:
                d.run_step()
        d.advance(0.01)
    d.run()
    assert {c: d.shown[c] for c in asked} == {c: r.answer for c, r in asked.items()}
    before_first = [c for c in d.changes if c.before is S.RECEIVING and c.after is S.PREEMPTED]
    assert before_first, "no prompt was put aside, which shows nothing"
    d.all_returned()
