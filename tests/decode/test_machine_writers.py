"""Ps that write into D's memory themselves: whom D lets, and when their blocks come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_grpc.blocks.pool import BlockState
from pd_grpc.decode import events as ev
from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.states import DecodeState as S
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import layout_pb2, types_pb2
from tests.decode.harness import Harness
from tests.decode.messages import BLOCK, Request
from tests.decode.prefill_peer import Prefill
from tests.decode.test_prefix_reuse import Asker

INLINE, SHM, NIXL = (
    layout_pb2.TRANSPORT_INLINE,
    layout_pb2.TRANSPORT_SHM,
    layout_pb2.TRANSPORT_NIXL,
)
MEMORY = Carrier(SHM, one_sided=True, metadata=b"how to get there")
BOTH = (MEMORY, INLINE_CARRIER)
OWNER = Owner("p", 10)


@pytest.fixture
def d() -> Iterator[Harness]:
    made = Harness(num_blocks=16, carriers=BOTH)
    yield made
    made.all_returned()


def writer(d: Harness, epoch: int = 10) -> Prefill:
    """A P that has D's memory."""
    d.feed(ev.WriterAttached(Owner("p", epoch)))
    return Prefill(d, epoch=epoch, transports=[SHM, INLINE])


def quarantined(d: Harness) -> int:
    return d.pool.counts()[BlockState.QUARANTINED]


def welcome_of(d: Harness, p: Prefill) -> tuple[int, list[bytes]]:
    welcome = d.told[p.stream][0].welcome
    return welcome.transport, [shard.transport_metadata for shard in welcome.shards]


# Who gets what


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ([SHM, INLINE], SHM),
        ([INLINE, SHM], SHM),
        ([NIXL, SHM], SHM),
        ([INLINE], INLINE),
        ([0, NIXL], INLINE),
        ([], INLINE),
    ],
)
def test_d_chooses_what_it_likes_best_of_what_both_have(
    d: Harness, offered: list[int], chosen: int
) -> None:
    p = Prefill(d, transports=offered)
    metadata = MEMORY.metadata if chosen == SHM else b""
    assert welcome_of(d, p) == (chosen, [metadata])


def test_a_d_that_likes_inline_best_is_not_written_to() -> None:
    d = Harness(carriers=(INLINE_CARRIER, MEMORY))
    assert welcome_of(d, Prefill(d, transports=[SHM, INLINE])) == (INLINE, [b""])


def test_nothing_in_common_is_refused_with_both_lists(d: Harness) -> None:
    p = Prefill(d, transports=[NIXL])
    fault = d.session_ends[p.stream]
    assert fault is not None and fault.reason is Reason.LAYOUT_MISMATCH
    assert fault.metadata == {
        "field": "transports",
        "ours": "TRANSPORT_SHM, TRANSPORT_INLINE",
        "theirs": "TRANSPORT_NIXL",
    }


def test_a_grant_names_the_sessions_transport_and_its_shard_how_to_get_there(d: Harness) -> None:
    p = writer(d)
    grant = p.granted(Request())
    (answer,) = d.answers.values()
    assert (answer.transport, answer.shards[0].transport_metadata) == (SHM, MEMORY.metadata)
    assert d.opened[grant].transport == SHM
    p.release(Request())
    d.close_receivers()


def test_who_is_not_known_to_have_the_memory_is_not_let_write(d: Harness) -> None:
    """Nobody could tell when it has stopped."""
    p = Prefill(d, transports=[SHM, INLINE])
    grant = p.granted(Request())
    assert d.opened[grant].transport == INLINE
    d.feed(ev.WriterAttached(OWNER))
    other = p.granted(Request("t-2"))
    assert d.opened[other].transport == SHM
    for request in (Request(), Request("t-2")):
        p.release(request)
    d.close_receivers()


# When the blocks come back


def test_blocks_come_back_when_p_says_that_it_has_stopped(d: Harness) -> None:
    p = writer(d)
    request = Request()
    client = d.generate(request)
    p.granted(request)
    held = d.pool.total - d.pool.free
    d.leave(client)
    d.close_receivers()
    assert quarantined(d) == held > 0
    d.advance_alive(p, 1000)
    assert quarantined(d) == held, "time frees nothing"
    p.release(request)
    assert quarantined(d) == 0
    assert d.late == 0, "it was waited for"


def test_a_release_that_does_not_say_so_keeps_them(d: Harness) -> None:
    p = writer(d)
    request = Request()
    p.granted(request)
    message = p.release_request(request)
    message.writes_stopped = False
    d.release(message)
    d.close_receivers()
    assert quarantined(d) > 0
    p.release(request)
    assert quarantined(d) == 0


def test_a_release_that_says_so_frees_them_at_once(d: Harness) -> None:
    p = writer(d)
    p.granted(Request())
    p.release(Request())
    d.close_receivers()
    assert quarantined(d) == 0


def test_inline_blocks_wait_for_no_p(d: Harness) -> None:
    p = Prefill(d, transports=[INLINE])
    client = d.generate(Request())
    p.granted(Request())
    d.leave(client)
    d.close_receivers()
    assert quarantined(d) == 0


def test_blocks_of_a_dead_process_come_back(d: Harness) -> None:
    p = writer(d)
    client = d.generate(Request())
    p.granted(Request())
    p.breaks()
    d.advance(d.config.grace_s + 0.1)
    assert d.reason(client) is Reason.PREFILL_LOST
    d.close_receivers()
    assert quarantined(d) > 0, "its session is gone; that its process is nobody knows"
    d.feed(ev.WriterGone(OWNER))
    assert quarantined(d) == 0


def test_a_successor_does_not_free_what_its_predecessor_may_write_to(d: Harness) -> None:
    """Invariant 4: of a process that was stopped in mid-write."""
    old = writer(d, epoch=10)
    request = Request()
    old.granted(request)
    new = writer(d, epoch=11)
    d.close_receivers()
    held = quarantined(d)
    assert held > 0
    # Not even by saying so in its name.
    new.release(request)
    assert quarantined(d) == held
    other = new.granted(Request("t-2"))
    blocks = set(d.opened[other].blocks)
    kept = {b for h in d.machine.ledger.quarantine.holdings() for b in h.blocks}
    assert not blocks & kept
    new.release(Request("t-2"))
    d.close_receivers()
    d.feed(ev.WriterGone(Owner("p", 11)))
    assert quarantined(d) == held
    d.feed(ev.WriterGone(Owner("p", 10)))
    assert quarantined(d) == 0


def test_what_p_says_is_of_every_grant_of_a_key_that_was_used_again(d: Harness) -> None:
    """P takes a key again only when it has stopped, and D once it has forgotten it."""
    p = writer(d)
    request = Request()
    for _ in range(2):
        grant = p.granted(request)
        d.feed(ev.OperatorReleased(request.transfer_id, 0, "test"))
        d.advance_alive(p, d.config.tombstone_s + 1)
    assert quarantined(d) == 2 * len(d.opened[grant].blocks)
    p.release(request)
    assert quarantined(d) == 0
    assert d.late == 0, "both were waited for"


def test_what_is_complete_waits_for_nobody(d: Harness) -> None:
    """The end of a transfer says that P has stopped."""
    p = writer(d)
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    d.receive(grant, request.tokens)
    d.leave(client)
    d.close_receivers()
    assert quarantined(d) == 0


def test_what_is_complete_when_its_transfer_has_ended_waits_for_nobody(d: Harness) -> None:
    """P knows that D has its End, and has nothing else to say."""
    d.holds_closes = True
    p = writer(d)
    client = d.generate(Request())
    grant = p.granted(Request())
    d.feed(ev.ReceiveStarted(grant))
    d.leave(client)
    d.feed(ev.ReceiveCompleted(grant))
    assert quarantined(d) > 0, "its own shard has yet to close"
    d.close_receivers()
    assert quarantined(d) == 0
    assert d.late == 1


def test_an_answer_complete_before_its_kv_waits_for_the_writer(d: Harness) -> None:
    p = writer(d)
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    d.feed(ev.ReceiveStarted(grant))
    p.first_token(request, grant, finish=types_pb2.FINISH_REASON_STOP)
    assert client in d.finished
    d.close_receivers()
    assert quarantined(d) > 0
    p.release(request)
    assert quarantined(d) == 0


def test_a_process_that_had_let_go_before_the_end_is_not_waited_for(d: Harness) -> None:
    p = writer(d)
    client = d.generate(Request())
    p.granted(Request())
    d.feed(ev.WriterGone(OWNER))
    d.leave(client)
    d.close_receivers()
    assert quarantined(d) == 0


def test_a_d_that_leaves_waits_for_no_writer(d: Harness) -> None:
    p = writer(d)
    p.granted(Request())
    d.feed(ev.Leaving())
    d.close_receivers()
    assert quarantined(d) == 0


@pytest.mark.parametrize("state", [S.RESERVED, S.RECEIVING])
def test_d_waits_for_its_shard_and_the_writer_whichever_stops_last(d: Harness, state: S) -> None:
    d.holds_closes = True
    p = writer(d)
    request = Request()
    d.bring(p, request, state)
    d.feed(ev.OperatorReleased(request.transfer_id, 0, "test"))
    p.release(request)
    assert quarantined(d) > 0, "its own shard has yet to close"
    d.close_receivers()
    assert quarantined(d) == 0


# Beside a prefix cache

PROMPT = list(range(100, 100 + 3 * BLOCK))


def cached(d: Harness) -> int:
    return d.pool.counts()[BlockState.CACHED]


def test_what_was_found_is_no_writers_and_is_found_again(d: Harness) -> None:
    """Of a transfer that is given up, its own blocks alone wait for the writer."""
    asker = Asker(d, writer(d))
    asker.answer(asker.request(PROMPT))
    assert cached(d) == 3
    lost = asker.request([*PROMPT, 7, 8])
    client = d.generate(lost)
    grant = asker.grant(lost)
    opened = d.opened[grant.grant_id]
    assert (opened.transport, opened.wanted) == (SHM, ((3, 1),))
    d.feed(ev.ReceiveStarted(grant.grant_id))
    d.leave(client)
    d.close_receivers()
    assert (quarantined(d), cached(d)) == (len(opened.blocks) - 3, 3)
    # The others are given to whoever asks, and none that the writer may touch.
    again = asker.request([*PROMPT, 7, 8])
    answer = asker.answer(again)
    assert answer.cached_tokens == len(PROMPT)
    assert not set(d.opened[answer.grant_id].blocks) & set(opened.blocks[3:])
    asker.p.release(lost)
    assert quarantined(d) == 0


@pytest.mark.parametrize("first", [False, True])
def test_nothing_is_found_of_what_is_not_complete_though_every_layer_has_come(
    d: Harness, first: bool
) -> None:
    """Before its End a writer may write again, whatever was acknowledged."""
    asker = Asker(d, writer(d))
    request = asker.request(PROMPT)
    grant = asker.grant(request).grant_id
    d.feed(ev.ReceiveStarted(grant))
    d.feed(ev.ReceiveProgress(grant, 3 * BLOCK))
    if first:
        asker.p.first_token(request, grant)
    client = d.generate(request)
    assert len(d.machine.ledger.cache) == 0
    d.leave(client)
    d.close_receivers()
    assert quarantined(d) > 0 and cached(d) == 0
    other = asker.request(PROMPT)
    assert asker.grant(other).cached_tokens == 0
    asker.p.release(other)
    asker.p.release(request)
    d.close_receivers()
    assert (quarantined(d), len(d.machine.ledger.cache)) == (0, 0)


def test_what_is_complete_is_found_and_its_writer_not_waited_for(d: Harness) -> None:
    asker = Asker(d, writer(d))
    request = asker.request(PROMPT)
    client = d.generate(request)
    d.receive(asker.grant(request).grant_id, request.tokens)
    d.leave(client)
    d.close_receivers()
    assert (quarantined(d), cached(d)) == (0, 3)


def test_what_a_step_reads_is_neither_quarantined_nor_evicted(d: Harness) -> None:
    asker = Asker(d, writer(d))
    request = asker.request(PROMPT)
    client = d.generate(request)
    grant = asker.grant(request).grant_id
    d.receive(grant, request.tokens)
    asker.p.first_token(request, grant)
    assert d.step is not None
    d.leave(client)
    d.close_receivers()
    assert (quarantined(d), cached(d)) == (1, 0), "the block that the step writes to"
    assert asker.d.pool.free == d.pool.total - 4
    other = asker.request(PROMPT)
    assert asker.grant(other).cached_tokens == len(PROMPT)
    asker.p.release(other)
    d.close_receivers()
    d.run_step()
    assert (quarantined(d), cached(d)) == (0, 3)
