"""What all transfers to one shard may have on their way together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pd_grpc.prefill import pair_window
from pd_grpc.prefill.pair_window import (
    SLABS_PER_SHARE,
    SLABS_PER_WINDOW,
    TURN_WRITES,
    WRITES_AT_ONCE,
    PairWindow,
)
from pd_grpc.prefill.sender import TransferSender
from pd_grpc.transport.base import LayerRun, SendPlan, Slab
from tests.prefill.world import LAYOUT

BLOCKS = 8
LAYER = LAYOUT.layer_bytes(0)


def sender(
    window: int, kind: type[TransferSender] = TransferSender, chunk_bytes: int = LAYER
) -> TransferSender:
    """One whose KV is all computed and whose shard has answered; it sends layers of blocks."""
    tokens = BLOCKS * LAYOUT.block_size
    plan = SendPlan(tokens, tuple(range(BLOCKS)), ((0, BLOCKS),), (LayerRun(0, 0, 2),))
    made = kind(LAYOUT, plan, chunk_bytes, 10.0)
    made.opening(0.0)
    made.opened([], window * LAYER, 0.0)
    for layer in range(2):
        made.advance(0, layer, tokens)
    return made


def sent_by(each: TransferSender, window: PairWindow) -> list[Slab]:
    found = []
    while window.has_room(each):
        slab = each.next_slab(0.0, window.most_bytes(each))
        if slab is None:
            break
        window.sent(each)
        found.append(slab)
    return found


def test_two_senders_have_no_more_on_their_way_than_one() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    for each in (first, second):
        window.join(each, lambda: None, "d:1")
    assert len(sent_by(first, window)) == 4
    # One that has nothing on its way does not wait for another, however silent its stream.
    assert len(sent_by(second, window)) == 1
    assert first.unacked_bytes + second.unacked_bytes == 5 * LAYER


@pytest.mark.parametrize("streams", [2, 4, 32])
def test_however_many_streams_there_are_two_windows_and_a_chunk_are_on_their_way(
    streams: int,
) -> None:
    """Each may go on, with a smaller slab the more there are."""
    window, chunk = PairWindow(), 4 * LAYER
    senders = [sender(8, chunk_bytes=chunk) for _ in range(streams)]
    for each in senders:
        window.join(each, lambda: None, "d:1")
    for each in senders:
        assert sent_by(each, window)
    on_their_way = sum(each.unacked_bytes for each in senders)
    least = streams * LAYER  # A block-layer is not cut.
    assert on_their_way <= 8 * LAYER + chunk + max(8 * LAYER, least)


def test_no_slab_is_larger_than_a_transfers_share_of_a_large_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where slabs may be as large as the window, all transfers begin and none waits for the end of
    another."""
    monkeypatch.setattr(pair_window, "LEAST_SHARE_BYTES", 2 * LAYER)
    window, senders = PairWindow(), [sender(8, chunk_bytes=8 * LAYER) for _ in range(4)]
    window.join(senders[0], lambda: None, "d:1")
    assert window.most_bytes(senders[0]) == 8 * LAYER, "it is alone"
    for each in senders[1:]:
        window.join(each, lambda: None, "d:1")
    for each in senders:
        slab = each.next_slab(0.0, window.most_bytes(each))
        assert slab is not None and slab.layers * slab.blocks == 2
        window.sent(each)
    assert sum(each.unacked_bytes for each in senders) == 8 * LAYER
    crowd, many = PairWindow(), [sender(8) for _ in range(8)]
    for each in many:
        crowd.join(each, lambda: None, "d:1")
    assert crowd.most_bytes(many[0]) == 2 * LAYER, "no less than is worth it"


def test_an_ack_of_one_makes_room_for_the_other() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    woken: list[str] = []
    window.join(first, lambda: woken.append("first"), "d:1")
    window.join(second, lambda: woken.append("second"), "d:1")
    slabs = sent_by(first, window)
    sent_by(second, window)
    first.acked(slabs[:3], 3 * LAYER, 0.0)
    window.acked()
    assert woken == ["first", "second"]
    assert len(sent_by(second, window)) == 2


def test_what_a_sender_had_on_its_way_counts_no_more_when_it_has_left() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    woken: list[str] = []
    window.join(first, lambda: woken.append("first"), "d:1")
    window.join(second, lambda: woken.append("second"), "d:1")
    sent_by(first, window)
    sent_by(second, window)
    window.leave(first)
    window.leave(first)
    assert woken == ["second"]
    assert len(sent_by(second, window)) == 3


def test_what_was_on_the_way_on_a_broken_stream_counts_no_more() -> None:
    window, first, second = PairWindow(), sender(4), sender(4)
    window.join(first, lambda: None, "d:1")
    window.join(second, lambda: None, "d:1")
    sent_by(first, window)
    first.broken()
    assert not first.unacked_bytes
    assert len(sent_by(second, window)) == 4


def test_whoever_has_sent_last_is_woken_last() -> None:
    window = PairWindow()
    senders = {name: sender(4) for name in ("first", "second", "third")}
    woken: list[str] = []
    for name, each in senders.items():
        window.join(each, lambda name=name: woken.append(name), "d:1")  # type: ignore[misc]
    sent_by(senders["first"], window)
    sent_by(senders["third"], window)
    window.acked()
    assert woken == ["second", "first", "third"]


@pytest.mark.parametrize(
    ("connections", "layers"),
    [(1, 16), (2, 32 // (2 * SLABS_PER_SHARE)), (8, 32 // SLABS_PER_WINDOW)],
)
def test_the_more_connections_there_are_the_smaller_are_slabs(
    connections: int, layers: int
) -> None:
    """Eight transfers over one connection send whole chunks; the window is 32 layers of blocks."""
    window, senders = PairWindow(), [sender(32, chunk_bytes=16 * LAYER) for _ in range(8)]
    for i, each in enumerate(senders):
        window.join(each, lambda: None, f"d:{i % connections}")
    assert sizes_of(sent_by(senders[0], window)) == [layers] * (16 // layers)
    for each in senders[:-1]:
        window.leave(each)
    last = sent_by(senders[-1], window)
    assert sizes_of(last) == [16], "over one connection slabs are whole again"


def sizes_of(slabs: list[Slab]) -> list[int]:
    return [slab.layers * slab.blocks for slab in slabs]


class Writers:
    """Writers that take their turn and keep it until they are let go."""

    def __init__(self, window: PairWindow) -> None:
        self.window = window
        self.writing: list[int] = []
        self.done = [asyncio.Event() for _ in range(WRITES_AT_ONCE + 2)]
        self.tasks = [asyncio.create_task(self._write(i)) for i in range(len(self.done))]

    async def _write(self, number: int) -> None:
        async with self.window.turn("d:1"):
            self.writing.append(number)
            await self.done[number].wait()

    async def settle(self) -> None:
        """Until nobody goes on by himself: each turn takes a few steps of the loop."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        for done in self.done:
            done.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn may take as long as it likes."""
    monkeypatch.setattr(pair_window, "TURN_S", 3600.0)


async def test_a_few_write_at_once_and_the_others_in_the_order_they_came(patient: None) -> None:
    writers = Writers(PairWindow())
    await writers.settle()
    first = list(range(WRITES_AT_ONCE))
    assert writers.writing == first
    writers.done[0].set()
    await writers.settle()
    assert writers.writing == [*first, WRITES_AT_ONCE]
    await writers.finish()
    assert writers.writing == [*first, WRITES_AT_ONCE, WRITES_AT_ONCE + 1]


async def test_a_write_that_is_held_up_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = Writers(PairWindow())
    async with asyncio.timeout(30):
        while len(writers.writing) < len(writers.tasks):
            await asyncio.wait(writers.tasks, timeout=pair_window.TURN_S)
    # Turns that were over before their writes were are not given back twice.
    await writers.finish()
    monkeypatch.setattr(pair_window, "TURN_S", 3600.0)
    again = Writers(writers.window)
    await again.settle()
    assert len(again.writing) == WRITES_AT_ONCE
    await again.finish()


async def test_a_turn_lasts_for_a_few_writes(patient: None) -> None:
    async with PairWindow().turn("d:1") as turn:
        lasts = [turn.wrote() for _ in range(TURN_WRITES)]
    assert lasts == [True] * (TURN_WRITES - 1) + [False]


async def test_a_turn_that_has_taken_too_long_is_over_after_its_write() -> None:
    loop = asyncio.get_running_loop()
    async with PairWindow().turn("d:1") as turn:
        assert turn.wrote()
        # Set after the turn's own timer, so that it is over after it.
        too_long = loop.create_future()
        loop.call_later(pair_window.TURN_S, too_long.set_result, None)
        await asyncio.wait_for(too_long, 30)
        assert not turn.wrote()


async def test_a_writer_that_is_cancelled_takes_no_turn_with_it(patient: None) -> None:
    window = PairWindow()
    writers = Writers(window)
    await writers.settle()
    for task in writers.tasks:
        task.cancel()
    for task in writers.tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    again = Writers(window)
    await again.settle()
    assert again.writing == list(range(WRITES_AT_ONCE))
    await again.finish()


def test_an_ack_costs_time_in_the_senders_and_not_in_their_square() -> None:
    """All are woken by it, and all but the first find no room."""
    looks = 0

    class Watched(TransferSender):
        @property
        def unacked_bytes(self) -> int:
            nonlocal looks
            looks += 1
            return super().unacked_bytes

    window, senders = PairWindow(), [sender(4, Watched) for _ in range(40)]
    for each in senders:
        window.join(each, lambda: None, "d:1")
    slabs = [sent_by(each, window) for each in senders]
    looks = 0
    senders[0].acked(slabs[0][:1], LAYER, 0.0)
    window.acked()
    assert not any(window.has_room(each) for each in senders), "the others have more than a window"
    assert looks <= 2 * len(senders)


async def test_one_connection_takes_no_turns_of_another(patient: None) -> None:
    window = PairWindow()
    writers = Writers(window)
    await writers.settle()
    assert len(writers.writing) == WRITES_AT_ONCE
    async with asyncio.timeout(30), window.turn("d:2"):
        pass
    await writers.finish()
