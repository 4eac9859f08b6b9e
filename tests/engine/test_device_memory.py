"""A pool on a device against one of the host, on a device that does nothing before it is waited
for, and on a GPU where there is one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from pd_grpc.engine import device_memory
from pd_grpc.engine.device import CPU, CudaStreams, HostStreams, Streams
from pd_grpc.engine.device_memory import SLOTS, DeviceKvMemory
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from tests.engine.deferred_device import WAITS, DeferredStreams

BLOCKS, LAYERS, HEADS, TOKENS, DIM = 24, 5, 3, 4, 6
LAYOUT = KvLayout(
    "model",
    "positions",
    TOKENS,
    (
        KvGroup(
            GroupKind.FULL,
            LAYERS,
            tuple(Plane(kind, "bfloat16", HEADS, DIM) for kind in (PlaneKind.K, PlaneKind.V)),
        ),
    ),
)
HEAD_BYTES = 2 * TOKENS * DIM * 2

DEVICES = [
    pytest.param(lambda: (CPU, HostStreams()), id="host"),
    pytest.param(lambda: (CPU, DeferredStreams()), id="deferred"),
    pytest.param(
        lambda: (torch.device("cuda", 0), CudaStreams(torch.device("cuda", 0))),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    ),
]
Make = Callable[[], tuple[torch.device, Streams]]


def pool(device: torch.device, streams: Streams, seed: int = 0) -> DeviceKvMemory:
    """A pool of random bytes, any of which may be the bits of no number."""
    raw = bytearray(random.Random(seed).randbytes(BLOCKS * LAYOUT.block_bytes))
    blocks = torch.frombuffer(raw, dtype=torch.bfloat16).view(BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM)
    return DeviceKvMemory(blocks.clone().to(device), LAYOUT, streams)


def host_pool(seed: int = 0) -> HostKvMemory:
    """The same bytes on the host."""
    raw = bytearray(random.Random(seed).randbytes(BLOCKS * LAYOUT.block_bytes))
    return HostKvMemory(raw, LAYOUT)


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("slot_bytes", [1 << 20, 2 * HEADS * HEAD_BYTES, 1])
def test_slabs_go_in_and_out_as_on_the_host(
    make: Make, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all of a slab in a buffer, for two layers, and for one."""
    monkeypatch.setattr(device_memory, "SLOT_BYTES", slot_bytes)
    r = random.Random(slot_bytes)
    ours, theirs = pool(*make()), host_pool()
    for turn in range(12):
        blocks = r.sample(range(BLOCKS), r.randint(0, BLOCKS))
        layer = r.randrange(LAYERS)
        layers = r.randint(1, LAYERS - layer)
        first = r.randrange(HEADS)
        heads = None if turn % 3 == 0 else (first, r.randint(1, HEADS - first))
        size = len(blocks) * layers * HEAD_BYTES * (HEADS if heads is None else heads[1])
        payload = memoryview(r.randbytes(size))
        slab = blocks, 0, layer, layers
        assert b"".join(ours.read(*slab, heads)) == b"".join(theirs.read(*slab, heads))
        ours.write(*slab, payload, heads)
        theirs.write(*slab, payload, heads)
        assert b"".join(ours.read(*slab, heads)) == payload
    everything = range(BLOCKS), 0, 0, LAYERS
    assert b"".join(ours.read(*everything)) == b"".join(theirs.read(*everything))


@pytest.mark.parametrize("ignored", ["host waits", "stream waits"])
def test_each_wait_of_the_memory_is_needed(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ignored in WAITS
    monkeypatch.setattr(device_memory, "SLOT_BYTES", 1)
    ours = pool(CPU, DeferredStreams(ignored=ignored))
    payload = random.Random(1).randbytes(2 * SLOTS * HEADS * HEAD_BYTES)
    blocks = range(2 * SLOTS)
    ours.write(blocks, 0, 0, 1, memoryview(payload))
    assert b"".join(ours.read(blocks, 0, 0, 1)) != payload


def test_a_buffer_is_not_filled_again_before_it_has_been_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many writes that nobody waits for, each has its own bytes."""
    monkeypatch.setattr(device_memory, "SLOT_BYTES", 1)
    ours = pool(CPU, DeferredStreams())
    payloads = [random.Random(i).randbytes(HEADS * HEAD_BYTES) for i in range(3 * SLOTS)]
    for block, payload in enumerate(payloads):
        ours.write([block], 0, 1, 1, memoryview(payload))
    for block, payload in enumerate(payloads):
        assert b"".join(ours.read([block], 0, 1, 1)) == payload


def test_pieces_are_the_callers_own() -> None:
    ours = pool(CPU, DeferredStreams())
    before = ours.read([1, 2], 0, 0, LAYERS)
    kept = b"".join(before)
    ours.write([1, 2], 0, 0, LAYERS, memoryview(bytes(len(kept))))
    for _ in range(2 * SLOTS):
        ours.read([1, 2], 0, 0, LAYERS)
    assert b"".join(before) == kept
    assert all(piece.readonly for piece in before)


def test_a_payload_may_go_once_it_has_been_written() -> None:
    ours = pool(CPU, DeferredStreams())
    payload = bytearray(random.Random(3).randbytes(HEADS * HEAD_BYTES))
    kept = bytes(payload)
    ours.write([7], 0, 2, 1, memoryview(payload))
    payload[:] = bytes(len(payload))
    assert b"".join(ours.read([7], 0, 2, 1)) == kept


@pytest.mark.parametrize("make", DEVICES)
def test_threads_read_and_write_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "SLOT_BYTES", HEADS * HEAD_BYTES)
    ours = pool(*make())
    wrong = []

    def work(mine: range, seed: int) -> None:
        r = random.Random(seed)
        for _ in range(20):
            payload = r.randbytes(len(mine) * HEADS * HEAD_BYTES)
            ours.write(mine, 0, 3, 1, memoryview(payload))
            if b"".join(ours.read(mine, 0, 3, 1)) != payload:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(range(6 * i, 6 * i + 6), i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nobody_is_given_an_address_of_it() -> None:
    ours = pool(CPU, HostStreams())
    assert (ours.num_blocks, ours.shared_fd, ours.host_address) == (BLOCKS, None, None)
    assert ours.stored is ours


@pytest.mark.parametrize(
    ("slab", "heads", "says"),
    [
        (([BLOCKS], 0, 0, 1), None, f"block {BLOCKS} is outside"),
        (([-1], 0, 0, 1), None, "block -1 is outside"),
        (([0], 0, LAYERS, 1), None, "layers"),
        (([0], 0, 0, LAYERS + 1), None, "layers"),
        (([0], 0, -1, 1), None, "layers"),
        (([0], 0, 0, 0), None, "layers"),
        (([0], 1, 0, 1), None, "group 1: it has 0"),
        (([0], 0, 0, 1), (0, HEADS + 1), "heads"),
        (([0], 0, 0, 1), (HEADS, 1), "heads"),
    ],
)
def test_what_is_not_there_is_neither_read_nor_written(
    slab: tuple[list[int], int, int, int], heads: tuple[int, int] | None, says: str
) -> None:
    ours = pool(CPU, HostStreams())
    with pytest.raises(ValueError, match=says):
        ours.read(*slab, heads)
    with pytest.raises(ValueError, match=says):
        ours.write(*slab, memoryview(b""), heads)


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="payload has 1 bytes; 2 blocks of 1 layers take"):
        pool(CPU, HostStreams()).write([1, 2], 0, 0, 1, memoryview(b"x"))
