"""KV that gave no numbers is found no more: the next that asks for it gets it anew.

The harness's engine makes no numbers of the blocks that a test calls damaged."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Reason
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request
from tests.decode.test_prefix_reuse import PROMPT, Asker, wanted

LONGER = [*PROMPT, 9]


@pytest.fixture
def asker(d: Harness) -> Asker:
    return Asker(d)


def found(d: Harness, prompt: list[int] = PROMPT) -> list[int]:
    """The blocks that are known of a prompt."""
    return d.machine.ledger.cache.find(BlockChain(BLOCK).names(prompt, len(prompt) // BLOCK))


def bring(asker: Asker, request: Request) -> int:
    """Hand a request over, before its first step on D; returns the client's call."""
    client = asker.d.generate(request)
    grant = asker.grant(request).grant_id
    asker.d.receive(grant, request.tokens)
    asker.p.first_token(request, grant)
    return client


def failed(d: Harness, client: int) -> bool:
    """Whether no numbers came of a request's KV."""
    fault = d.refused.get(client)
    return fault is not None and (fault.reason, fault.message) == (
        Reason.ENGINE_ERROR,
        "logits are not finite numbers",
    )


@pytest.mark.parametrize("local", [True, False], ids=["local", "handed over"])
@pytest.mark.parametrize("at", [0, 1])
def test_one_request_fails_of_damaged_kv_and_the_next_is_answered(
    asker: Asker, at: int, local: bool
) -> None:
    """S4."""
    d = asker.d
    asker.answer(asker.request(PROMPT))
    d.damaged = {found(d)[at]}
    bad = asker.request(LONGER)
    client = d.generate(bad, local=True) if local else bring(asker, bad)
    d.run()
    assert failed(d, client)
    assert d.shown.get(client, []) == ([] if local else bad.answer[:1]), "P's own, and no more"
    assert not found(d)
    assert d.pool.counts()[BlockState.FREE] == d.pool.total
    if local:
        again = asker.request(LONGER)
        client = d.generate(again, local=True)
        d.run()
        assert d.shown[client] == again.answer
    else:
        assert wanted(asker.answer(asker.request(LONGER))) == [(0, 4)]
    assert len(found(d)) == 3


def test_kv_that_came_damaged_is_not_found_though_all_of_it_was_verified(asker: Asker) -> None:
    d, bad = asker.d, asker.request(PROMPT)
    client = d.generate(bad)
    grant = asker.grant(bad).grant_id
    d.receive(grant, bad.tokens)
    assert found(d), "until its first step nobody knows"
    d.damaged = {d.opened[grant].blocks[2]}
    asker.p.first_token(bad, grant)
    d.run()
    assert failed(d, client) and not found(d)
    assert wanted(asker.answer(asker.request(PROMPT))) == [(0, 3)]


def test_those_who_have_found_it_already_fail_and_take_no_new_copy_with_them(asker: Asker) -> None:
    d = asker.d
    asker.answer(asker.request(PROMPT))
    d.damaged = set(found(d)[:1])
    first, other = asker.request(LONGER), asker.request([*PROMPT, 8])
    late = asker.grant(other)
    assert wanted(late) == [(3, 1)]
    client = bring(asker, first)
    d.run()
    assert failed(d, client) and not found(d)
    asker.answer(asker.request(PROMPT))
    anew = found(d)
    assert len(anew) == 3 and not d.damaged.intersection(anew)
    client = d.generate(other)
    d.receive(late.grant_id, other.tokens)
    asker.p.first_token(other, late.grant_id)
    d.run()
    assert failed(d, client)
    assert found(d) == anew
    assert wanted(asker.answer(asker.request(LONGER))) == [(3, 1)]


def test_what_is_distrusted_stays_whole_for_who_holds_it(asker: Asker) -> None:
    """Whether it is bad for them too they learn by themselves: what was damaged may be another
    block of the one that failed."""
    d = asker.d
    asker.answer(asker.request(PROMPT))
    shared = found(d)
    good, bad = asker.request([*PROMPT, 8], max_tokens=9), asker.request(LONGER, max_tokens=9)
    clients = [bring(asker, request) for request in (good, bad)]
    d.damaged = {d.transfer(bad.transfer_id).holding.blocks[3]}  # type: ignore[union-attr]
    while not d.refused:
        d.run_step()
    assert failed(d, clients[1]) and not found(d)
    assert d.state(good.transfer_id) is S.DECODING
    assert d.pool.counts()[BlockState.DECODING] >= 3
    assert {d.pool.state_of(block) for block in shared} == {BlockState.DECODING}
    d.run()
    assert d.shown[clients[0]] == good.answer
    assert {d.pool.state_of(block) for block in shared} == {BlockState.FREE}


def test_a_request_that_leaves_no_token_takes_nothing_with_it(asker: Asker) -> None:
    """Otherwise a client could have the beginning that all share computed anew at will."""
    d = asker.d
    asker.answer(asker.request(PROMPT))
    client = bring(asker, asker.request(LONGER))
    transfer = d.machine.ledger.of_call(client)
    assert transfer is not None
    d.tokenless = {transfer.grant_id}
    d.run()
    assert d.refused[client].message == "no token is left"
    assert len(found(d)) == 3
    assert wanted(asker.answer(asker.request(LONGER))) == [(3, 1)]


def test_what_a_step_shows_counts_though_its_request_has_gone(asker: Asker) -> None:
    d = asker.d
    asker.answer(asker.request(PROMPT))
    d.damaged = set(found(d)[:1])
    client = bring(asker, asker.request(LONGER))
    assert d.step is not None
    d.leave(client)
    assert len(found(d)) == 3
    d.run_step()
    assert not found(d)
    assert wanted(asker.answer(asker.request(LONGER))) == [(0, 4)]
