"""Steps of D that fail: whoever is at fault fails, and nobody else."""

from __future__ import annotations

from math import ceil, log2

import pytest

from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Code, Fault, Reason
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request, requests
from tests.decode.prefill_peer import Prefill


def decoding(n: int, num_blocks: int = 100) -> tuple[Harness, list[Request]]:
    """A D in whose step that runs so many requests decode together; they are calls 1 to n."""
    d = Harness(num_blocks=num_blocks, max_batch=n, prefill_batch=n, chunk_tokens=128)
    asked = list(requests(n, max_tokens=12))
    assert [d.generate(request, local=True) for request in asked] == list(range(1, n + 1))
    while d.step is None or len(d.step.decode) < n:
        d.run_step()
    return d, asked


def grant_of(d: Harness, call: int) -> str:
    transfer = d.machine.ledger.of_call(call)
    assert transfer is not None
    return transfer.grant_id


def only_these_fail(d: Harness, asked: list[Request], bad: set[int]) -> None:
    """Once the engine has nothing to do: every other answer is right, and every block is back."""
    d.run()
    for call, request in enumerate(asked, 1):
        if call in bad:
            fault = d.refused[call]
            assert (fault.reason, fault.code) == (Reason.ENGINE_ERROR, Code.INTERNAL)
            assert d.shown.get(call, []) == request.answer[: len(d.shown.get(call, []))]
        else:
            assert d.shown[call] == request.answer
    assert set(d.refused) == bad
    d.all_returned()


@pytest.mark.parametrize("bad", [{1}, {3}, {5}, {2, 4}, {1, 2, 3, 4, 5}])
def test_whoever_gets_no_token_fails_alone_and_no_step_is_run_again(bad: set[int]) -> None:
    """S4."""
    d, asked = decoding(5)
    began = len(d.steps)
    d.tokenless = {grant_of(d, call) for call in bad}
    d.run_step()
    assert set(d.refused) == bad
    assert {d.refused[call].message for call in bad} == {"no token is left"}
    assert all(len(plan.decode) == 5 - len(bad) for plan in d.steps[began:])
    only_these_fail(d, asked, bad)


def test_a_prompt_that_gets_no_token_fails_beside_those_that_decode() -> None:
    d, asked = decoding(3)
    bad = Request(prompt=[7] * 3 * BLOCK, request_id="bad")
    client = d.generate(bad, local=True)
    d.tokenless = {grant_of(d, client)}
    d.run_step()  # planned before it came
    d.run_step()
    assert d.refused[client].message == "no token is left"
    names = BlockChain(BLOCK).names(bad.tokens, 3)
    assert not d.machine.ledger.cache.find(names), "its KV may be what is wrong"
    only_these_fail(d, [*asked, bad], {client})


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("bad", [1, 2, -1])
def test_the_one_that_the_engine_raises_over_is_found_by_halves(n: int, bad: int) -> None:
    """S4."""
    d, asked = decoding(n)
    bad %= n + 1
    d.raising = {grant_of(d, bad)}
    shown = {call: len(d.shown[call]) for call in d.shown if call != bad}
    steps = 0
    while not d.refused or any(len(d.shown[call]) == shown[call] for call in shown):
        d.run_step()
        steps += 1
        assert steps <= 1 + 2 * ceil(log2(n))
    assert all(len(d.shown[call]) == shown[call] + 1 for call in shown), "one turn for each"
    only_these_fail(d, asked, {bad})


@pytest.mark.parametrize("n", [2, 5, 8])
def test_an_engine_that_always_raises_fails_all_in_bounded_steps(n: int) -> None:
    d, asked = decoding(n)
    before = len(d.steps)
    d.raising = {grant_of(d, call) for call in range(1, n + 1)}
    only_these_fail(d, asked, set(range(1, n + 1)))
    assert len(d.steps) - before <= 2 * n - 2


def test_a_step_that_raises_once_costs_nobody_anything() -> None:
    d, asked = decoding(6)
    d.fail_step(Fault(Reason.ENGINE_ERROR, "out of memory"))
    only_these_fail(d, asked, set())


def test_of_chunks_and_slots_that_fail_together_the_chunk_is_found() -> None:
    d, asked = decoding(3)
    prompts = [Request(prompt=[20 + i] * 9, request_id=f"p{i}", max_tokens=6) for i in range(3)]
    calls = [d.generate(request, local=True) for request in prompts]
    d.raising = {grant_of(d, calls[1])}
    d.run_step()  # planned before they came
    assert d.step is not None and (len(d.step.prefill), len(d.step.decode)) == (3, 3)
    only_these_fail(d, [*asked, *prompts], {calls[1]})


def test_handed_over_requests_are_found_as_well(d: Harness, p: Prefill) -> None:
    asked = list(requests(4, max_tokens=9))
    calls = [d.generate(request) for request in asked]
    for request in asked:
        p.hand_off(request)
    d.raising = {grant_of(d, calls[2])}
    d.run()
    assert set(d.refused) == {calls[2]}
    assert d.reason(calls[2]) is Reason.ENGINE_ERROR
    right = {c: r.answer for c, r in zip(calls, asked, strict=True) if c != calls[2]}
    assert {call: d.shown[call] for call in right} == right


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_a_suspect_may_leave(leaves: int) -> None:
    d, asked = decoding(4)
    d.raising = {grant_of(d, 3)}
    d.run_step()
    d.leave(leaves)
    d.run()
    assert set(d.refused) == {3}
    for call in {1, 2, 4} - {leaves}:
        assert d.shown[call] == asked[call - 1].answer
    d.all_returned()


def test_those_that_come_meanwhile_wait_until_it_is_found() -> None:
    d, asked = decoding(4)
    d.raising = {grant_of(d, 4)}
    d.run_step()
    late = Request(prompt=[9, 9], request_id="late")
    client = d.generate(late, local=True)
    for _ in range(1 + 2 * 2):
        if not d.refused:
            assert d.step is not None and not d.step.prefill, "it would be suspected for nothing"
            d.run_step()
    d.run()
    assert d.shown[client] == late.answer
    only_these_fail(d, asked, {4})


def test_a_suspect_that_is_put_off_is_found_when_it_is_back() -> None:
    """In a pool in which the older ones need its blocks while they are tried apart."""
    d, asked = decoding(3, num_blocks=8)
    d.raising = {grant_of(d, 3)}
    only_these_fail(d, asked, {3})
    assert any(change.after is S.PREEMPTED for change in d.changes)
