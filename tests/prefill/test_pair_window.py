"""What all transfers to one shard may have on their way together."""

from __future__ import annotations

from pd_grpc.prefill.pair_window import PairWindow
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.transport.base import LayerRun, SendPlan, Slab
from tests.prefill.world import LAYOUT

BLOCKS = 8
LAYER = LAYOUT.layer_bytes(0)


def sender(window: int) -> TransferSender:
    """One whose KV is all computed and whose shard has answered; it sends layers of blocks."""
    tokens = BLOCKS * LAYOUT.block_size
    plan = SendPlan(tokens, tuple(range(BLOCKS)), ((0, BLOCKS),), (LayerRun(0, 0, 2),))
    made = TransferSender(LAYOUT, plan, LAYER, 10.0)
    made.opening(0.0)
    made.opened([], window * LAYER, 0.0)
    for layer in range(2):
        made.advance(0, layer, tokens)
    return made


def sent_by(each: TransferSender, window: PairWindow) -> list[Slab]:
    found = []
    while window.has_room(each) and (slab := each.next_slab(0.0)) is not None:
        window.sent(each)
        found.append(slab)
    return found


def test_two_senders_have_no_more_on_their_way_than_one() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    for each in (first, second):
        window.join(each, lambda: None)
    assert len(sent_by(first, window)) == 4
    # One that has nothing on its way does not wait for another, however silent its stream.
    assert len(sent_by(second, window)) == 1
    assert first.unacked_bytes + second.unacked_bytes == 5 * LAYER


def test_an_ack_of_one_makes_room_for_the_other() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    woken: list[str] = []
    window.join(first, lambda: woken.append("first"))
    window.join(second, lambda: woken.append("second"))
    slabs = sent_by(first, window)
    sent_by(second, window)
    first.acked(slabs[:3], 3 * LAYER, 0.0)
    window.acked()
    assert woken == ["first", "second"]
    assert len(sent_by(second, window)) == 2


def test_what_a_sender_had_on_its_way_counts_no_more_when_it_has_left() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    woken: list[str] = []
    window.join(first, lambda: woken.append("first"))
    window.join(second, lambda: woken.append("second"))
    sent_by(first, window)
    sent_by(second, window)
    window.leave(first)
    window.leave(first)
    assert woken == ["second"]
    assert len(sent_by(second, window)) == 3


def test_what_was_on_the_way_on_a_broken_stream_counts_no_more() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    window.join(first, lambda: None)
    window.join(second, lambda: None)
    sent_by(first, window)
    first.broken()
    assert not first.unacked_bytes
    assert len(sent_by(second, window)) == 4


def test_whoever_has_sent_last_is_woken_last() -> None:
    window = PairWindow()
    senders = {name: sender(4) for name in ("first", "second", "third")}
    woken: list[str] = []
    for name, each in senders.items():
        window.join(each, lambda name=name: woken.append(name))  # type: ignore[misc]
    sent_by(senders["first"], window)
    sent_by(senders["third"], window)
    window.acked()
    assert woken == ["second", "first", "third"]
