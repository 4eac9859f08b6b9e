"""What P has computed before it neither computes again nor sends where D has it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.engine.base import Sampled
from pd_grpc.prefill import actions as act
from pd_grpc.prefill import events as ev
from pd_grpc.prefill.states import PrefillState as S
from pd_grpc.protocol.block_hashes import BlockChain
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.v1 import decode_pb2, layout_pb2, sampling_pb2
from tests.prefill.world import LAYOUT, World

BLOCK = LAYOUT.block_size
TOKENS = 3 * BLOCK


def grant(world: World, transfer_id: str, *runs: tuple[int, int], cached: int = 0) -> None:
    """D grants, and wants these runs (start, count) of blocks."""
    asked = world.ask(transfer_id)
    response = decode_pb2.AllocateResponse(
        grant_id=f"g-{transfer_id}",
        transport=layout_pb2.TRANSPORT_INLINE,
        cached_tokens=cached,
    )
    for start, count in runs:
        response.wanted.add(start=start, count=count)
    response.shards.add(endpoint="d:1")
    world.feed(ev.AllocateAnswered(asked, response, None))


def compute(world: World, transfer_id: str) -> list[tuple[int, int]]:
    """Run the engine until the prompt is computed: (start, tokens) of each of its chunks."""
    chunks = []
    while world.state(transfer_id) is S.COMPUTING:
        run = world.step()
        for key, chunk in zip(run.keys, run.chunks, strict=True):
            if key.transfer_id == transfer_id:
                chunks.append((chunk.start, len(chunk.token_ids)))
    return chunks


def hand_off(world: World, transfer_id: str) -> None:
    world.answer_first_token(transfer_id=transfer_id)
    world.complete(transfer_id)
    assert world.state(transfer_id) is S.HANDED_OFF


def serve(world: World, transfer_id: str, tokens: int = TOKENS, **fields: Any) -> int:
    """A request from its call to the hand-off; returns the call."""
    number = world.call(transfer_id, tokens=tokens, **fields)
    if not world.taken(act.SendAllocate):
        world.connect()
    grant(world, transfer_id, (0, LAYOUT.blocks_for(tokens)))
    compute(world, transfer_id)
    hand_off(world, transfer_id)
    return number


def test_the_blocks_of_the_prompt_are_named_to_d(world: World) -> None:
    scope = sampling_pb2.RequestScope(cache_salt=b"s")
    world.call(tokens=TOKENS + 1, scope=scope, generated=(9, 9))
    world.connect()
    asked = world.ask().request
    tokens = [*range(3, 3 + TOKENS + 1), 9, 9]
    names = BlockChain(BLOCK, b"s").names(tokens, len(tokens) // BLOCK)
    assert [each.hash for each in asked.block_hashes] == names
    assert asked.scope.cache_salt == b"s"


def test_of_a_request_whose_kv_nobody_needs_no_block_is_named(world: World) -> None:
    world.call(tokens=TOKENS, max_tokens=1)
    world.connect()
    assert not world.ask().request.block_hashes


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(TOKENS, TOKENS - BLOCK), (TOKENS + 1, TOKENS), (2 * BLOCK + 1, 2 * BLOCK), (BLOCK, 0)],
)
def test_what_is_there_is_not_computed_again_but_for_the_last_token(
    world: World, tokens: int, cached: int
) -> None:
    serve(world, "t-1")
    call = world.call("t-2", tokens=tokens)
    grant(world, "t-2", (0, LAYOUT.blocks_for(tokens)))
    (opened,) = [a for a in world.taken(act.OpenTransfer) if a.key.transfer_id == "t-2"]
    assert opened.plan.ready == cached, "it can be sent at once"
    chunks = compute(world, "t-2")
    assert chunks[0][0] == cached and sum(count for _, count in chunks) == tokens - cached
    (said,) = [a for a in world.taken(act.SendFirstToken) if a.key.transfer_id == "t-2"]
    assert said.request.computed_tokens == tokens - cached
    hand_off(world, "t-2")
    last = [a for a in world.taken(act.Emit) if a.call == call][-1].response
    assert last.handed_off.usage.cached_tokens == cached


@pytest.mark.parametrize("not_finite", [True, False])
def test_what_no_numbers_come_of_is_computed_anew(world: World, not_finite: bool) -> None:
    """Were it what was asked for that left no token, the KV would be as good as before."""
    serve(world, "t-1")
    bad = world.call("t-2", tokens=TOKENS)
    grant(world, "t-2", (0, 3))
    world.step(tokenless=["t-2"], not_finite=not_finite)
    assert world.fault(bad).reason is Reason.ENGINE_ERROR
    world.call("t-3", tokens=TOKENS)
    grant(world, "t-3", (0, 3))
    assert compute(world, "t-3")[0][0] == (0 if not_finite else TOKENS - BLOCK)
    hand_off(world, "t-3")


def test_what_a_step_shows_counts_though_its_request_was_cancelled(world: World) -> None:
    serve(world, "t-1")
    call = world.call("t-2", tokens=TOKENS)
    grant(world, "t-2", (0, 3))
    world.feed(ev.PrefillCallEnded(call))
    for close in world.take(act.CloseTransfer):
        world.feed(ev.TransferClosed(close.key, close.strand))
    assert len(world.machine.cache) == 3
    world.step(tokenless=["t-2"], not_finite=True)
    assert len(world.machine.cache) == 1, "the last block was computed for it anew"


def test_an_earlier_chunk_of_what_no_numbers_come_of_is_found_no_more(world: World) -> None:
    bad = world.call("t-1", tokens=TOKENS)
    world.connect()
    grant(world, "t-1", (0, 3))
    world.step()
    assert len(world.machine.cache) == 2, "of its first chunk nothing was known"
    world.step(tokenless=["t-1"], not_finite=True)
    assert world.fault(bad).reason is Reason.ENGINE_ERROR
    assert len(world.machine.cache) == 0


def test_what_d_has_is_not_sent(world: World) -> None:
    serve(world, "t-1")
    world.call("t-2", tokens=TOKENS + 1)
    grant(world, "t-2", (3, 1), cached=TOKENS)
    (opened,) = [a for a in world.taken(act.OpenTransfer) if a.key.transfer_id == "t-2"]
    assert opened.plan.wanted == ((3, 1),)
    compute(world, "t-2")
    hand_off(world, "t-2")


def test_a_d_that_has_everything_gets_the_first_token_and_the_end(world: World) -> None:
    """And P, which has nothing, computes all of it."""
    world.call("t-1", tokens=TOKENS)
    world.connect()
    grant(world, "t-1", cached=TOKENS)
    assert compute(world, "t-1")[0][0] == 0
    hand_off(world, "t-1")


def test_shared_blocks_stay_while_the_other_still_sends(world: World) -> None:
    world.call("t-1", tokens=TOKENS)
    world.connect()
    grant(world, "t-1", (0, 3))
    compute(world, "t-1")
    world.call("t-2", tokens=TOKENS + 1)
    grant(world, "t-2", (0, 4))
    counts = world.pool.counts()
    assert counts[BlockState.SENDING] == 3 and counts[BlockState.COMPUTING] == 1
    assert compute(world, "t-2") == [(TOKENS, 1)]
    hand_off(world, "t-1")
    assert world.pool.counts()[BlockState.SENDING] == 4
    hand_off(world, "t-2")
    assert world.pool.counts()[BlockState.CACHED] == 3


def test_a_step_that_failed_leaves_nothing_to_be_found(world: World) -> None:
    call = world.call("t-1", tokens=TOKENS)
    world.connect()
    grant(world, "t-1", (0, 3))
    (run,) = world.taken(act.RunStep)
    world.feed(ev.StepFailed(run.step, "out of memory"))
    world.confirm_closed()
    assert world.fault(call).reason is Reason.ENGINE_ERROR
    assert len(world.machine.cache) == 0
    world.call("t-2", tokens=TOKENS)
    grant(world, "t-2", (0, 3))
    assert compute(world, "t-2")[0][0] == 0
    hand_off(world, "t-2")


def test_a_request_that_ended_in_its_step_leaves_only_what_was_computed_before(
    world: World,
) -> None:
    call = world.call("t-1", tokens=12)
    world.connect()
    grant(world, "t-1", (0, 3))
    first = world.step()
    computed = len(first.chunks[0].token_ids)
    assert computed < 12, "it takes two steps"
    run = world.taken(act.RunStep)[-1]
    world.feed(ev.PrefillCallEnded(call))
    world.feed(ev.TransferClosed(TransferKey("t-1", 1), 0))
    world.feed(ev.StepDone(run.step, [Sampled(7)]))
    assert len(world.machine.cache) == computed // BLOCK


def test_another_salt_is_computed_anew(world: World) -> None:
    salted = sampling_pb2.RequestScope(cache_salt=b"a")
    serve(world, "t-1", scope=salted)
    for number, salt, start in ((2, b"", 0), (3, b"b", 0), (4, b"a", TOKENS - BLOCK)):
        name = f"t-{number}"
        world.call(name, tokens=TOKENS, scope=sampling_pb2.RequestScope(cache_salt=salt))
        grant(world, name, (0, 3))
        assert compute(world, name)[0][0] == start
        hand_off(world, name)


def test_switched_off_nothing_is_kept() -> None:
    world = World(prefix_cache=0.0)
    serve(world, "t-1")
    assert world.pool.counts()[BlockState.FREE] == world.pool.total
    world.call("t-2", tokens=TOKENS)
    grant(world, "t-2", (0, 3))
    assert compute(world, "t-2")[0][0] == 0
    hand_off(world, "t-2")
