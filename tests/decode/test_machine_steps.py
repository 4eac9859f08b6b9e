"""What is in a step of D: those that decode, prompts in the rest of it, and who comes and goes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pd_grpc.decode.states import DecodeState as S
from pd_grpc.engine.chunks import CUT_TOKENS
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request
from tests.decode.prefill_peer import Prefill

BUDGET = 300
LONG = 900


def busy(**settings: Any) -> Harness:
    """A D of 300 tokens a step."""
    sizes = {"chunk_tokens": 2 * CUT_TOKENS, "step_tokens": BUDGET, **settings}
    return Harness(num_blocks=500, max_model_len=1024, **sizes)


def long_prompt() -> list[int]:
    return list(range(90, 90 + LONG))


def test_those_that_decode_have_a_token_in_every_step_beside_a_long_prompt() -> None:
    d = busy()
    short = [Request(prompt=[20 + i, 21, 22], max_tokens=12, request_id=f"s{i}") for i in range(4)]
    clients = [d.generate(r, local=True) for r in short]
    d.run_step()
    arriving = Request(prompt=long_prompt(), request_id="long")
    late = d.generate(arriving, local=True)
    d.run_step()  # planned before it came
    computed = 0
    while computed < LONG:
        plan = d.step
        assert plan is not None and len(plan.decode) == 4
        (chunk,) = plan.prefill
        assert len(chunk.token_ids) + len(plan.decode) <= BUDGET
        assert chunk.start == computed, "some of it in every step"
        computed += len(chunk.token_ids)
        d.run_step()
    d.run()
    assert [d.shown[c] for c in clients] == [r.answer for r in short]
    assert d.shown[late] == arriving.answer
    d.all_returned()


def test_a_full_batch_leaves_room_for_one_cut_of_a_prompt() -> None:
    d = busy(step_tokens=8 + CUT_TOKENS, prefill_batch=8)
    for i in range(8):
        d.generate(Request(prompt=[30 + i, 31], max_tokens=20, request_id=f"s{i}"), local=True)
    while d.step is None or len(d.step.decode) < 8:
        d.run_step()
    d.generate(Request(prompt=long_prompt(), request_id="long"), local=True)
    d.run_step()
    for _ in range(LONG // CUT_TOKENS):
        plan = d.step
        assert plan is not None and len(plan.decode) == 8
        assert [len(chunk.token_ids) for chunk in plan.prefill] == [CUT_TOKENS]
        d.run_step()
    d.run()
    d.all_returned()


@pytest.mark.parametrize("beside", [0, 1, 5, 7])
def test_company_moves_no_cut_off_the_grid(beside: int) -> None:
    d = busy()
    for i in range(beside):
        prompt = [40 + i] * (3 + 31 * i)
        d.generate(Request(prompt=prompt, max_tokens=9, request_id=f"s{i}"), local=True)
    if beside:
        d.run_step()
    request = Request(prompt=long_prompt(), request_id="long")
    client = d.generate(request, local=True)
    d.run()
    ends = [
        chunk.start + len(chunk.token_ids)
        for plan in d.steps
        for chunk in plan.prefill
        if list(chunk.token_ids) == request.prompt[chunk.start :][: len(chunk.token_ids)]
    ]
    assert ends[-1] == LONG and all(end % CUT_TOKENS == 0 for end in ends[:-1])
    assert d.shown[client] == request.answer
    d.all_returned()


def test_a_short_prompt_has_its_first_token_long_before_a_long_one_ahead_of_it() -> None:
    d = busy()
    long, short = Request(prompt=long_prompt(), request_id="l"), Request(request_id="s")
    first = d.generate(long, local=True)
    d.advance(0.01)
    second = d.generate(short, local=True)
    steps = 0
    while second not in d.shown:
        d.run_step()
        steps += 1
    assert steps == 2 and first not in d.shown
    d.run()
    assert [d.shown[c] for c in (first, second)] == [long.answer, short.answer]
    d.all_returned()


def test_requests_join_and_leave_between_any_two_steps() -> None:
    d = Harness(max_batch=3)
    p = Prefill(d)
    asked: dict[int, Request] = {}
    for i in range(6):
        request = Request(f"t-{i}", prompt=[50 + i] * (1 + 3 * i % 7), max_tokens=2 + i % 3)
        local = bool(i % 2)
        asked[d.generate(request, local=local)] = request
        if not local:
            p.hand_off(request)
        d.advance(0.01)
        d.run_step()
    d.run()
    assert {call: d.shown[call] for call in asked} == {c: r.answer for c, r in asked.items()}
    assert max(len(plan.decode) for plan in d.steps) == 3
    d.all_returned()


@pytest.mark.parametrize("kind", ["chunk", "slot"])
def test_one_that_leaves_in_mid_step_keeps_its_blocks_until_the_engine_is_done(kind: str) -> None:
    d = busy()
    stays, leaves = (Request(prompt=[60 + i] * 20, request_id=f"r{i}") for i in range(2))
    client = d.generate(stays, local=True)
    d.run_step()
    gone = d.generate(leaves, local=True)
    d.run_step()
    if kind == "slot":
        d.run_step()
    assert d.step is not None
    table = (d.step.prefill[0] if kind == "chunk" else d.step.decode[1]).block_table
    free = d.pool.free
    d.leave(gone)
    assert d.pool.free == free, "the engine may write to them"
    d.generate(Request(prompt=[70] * 8, request_id="next"), local=True)
    next_table = next(t for t in d.machine.ledger.transfers.values() if t.request_id == "next")
    assert next_table.holding is not None
    assert not set(next_table.holding.blocks) & set(table)
    d.run()
    assert d.shown[client] == stays.answer
    d.all_returned()


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_load_in_a_small_pool_gives_every_answer(seed: int) -> None:
    """Prompts that begin alike, some prefilled here and some handed over, more than fit at once."""
    random = Random(seed)
    d = Harness(num_blocks=20, max_batch=4)
    p = Prefill(d)
    shared = [random.randrange(10, 900) for _ in range(40)]
    asked: dict[int, Request] = {}
    for i in range(40):
        own = [random.randrange(10, 900) for _ in range(random.randrange(1, 9))]
        prompt = shared[: random.choice((0, 8, 20, 40))] + own
        request = Request(f"t-{i}", prompt, max_tokens=random.randrange(1, 15))
        local = random.random() < 0.6
        call = d.generate(request, local=local)
        asked[call] = request
        if not local:
            allocate = p.allocate(request)
            while allocate not in d.answers:
                d.run_step()
            grant = str(d.answers[allocate].grant_id)
            if request.max_tokens > 1:
                d.receive(grant, request.tokens)
            p.first_token(request, grant)
        for _ in range(random.randrange(6)):
            if d.step is not None:
                d.run_step()
        d.advance(0.01)
    d.run()
    assert {c: d.shown[c] for c in asked} == {c: r.answer for c, r in asked.items()}
    assert any(change.after is S.PREEMPTED for change in d.changes)
    assert d.machine.ledger.cache.found_blocks > 40 * 20 // BLOCK // 4
    d.all_returned()
