"""P3xx: the KV on its way to D's shards."""

from __future__ import annotations

from pd_grpc.conformance.case import NotApplicable, answer_s, expect, expect_equal, quiet_s
from pd_grpc.conformance.prefill.cases.registry import PREFILL_CASES as case
from pd_grpc.conformance.prefill.decode import CONNECTION_LOST, KitTimes
from pd_grpc.conformance.prefill.grant import expect_kv
from pd_grpc.conformance.prefill.shard import IncomingKv
from pd_grpc.conformance.prefill.subject import PrefillHand
from pd_grpc.protocol.faults import Code, Fault, Reason, bad_request
from pd_grpc.protocol.messages import INLINE
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import cut, heads_of, part_of
from pd_grpc.v1 import layout_pb2, transfer_pb2


@case(301, "First message, exactly once.")
async def open_names_the_grant(p: PrefillHand) -> None:
    """A Transfer begins with one open, which names transfer, grant, transport and shard."""
    d = await p.decode()
    request = p.request()
    await p.call(request, d).handed_off()
    grant = await d.granted(request.ref)
    (stream,) = d.transfers(1)
    expect_equal(stream.opens, 1, "the number of opens")
    expect_equal(stream.open.grant_id, grant.grant_id, "open.grant_id")
    expect_equal(stream.open.ref.transfer_id, request.transfer_id, "open.ref.transfer_id")
    expect_equal(stream.open.ref.attempt, request.attempt, "open.ref.attempt")
    expect_equal(stream.open.shard_index, 0, "open.shard_index")
    expect(stream.open.transport in INLINE, "transport INLINE", stream.open)


@case(302, "P sends open, waits for opened, then sends any number of chunks in any order, and end;")
async def nothing_before_opened(p: PrefillHand) -> None:
    """The shard takes its time to answer open: no chunk comes before it has."""
    d = await p.decode()
    d.kv.open.hold()
    caller = p.call(p.request(), d)
    await d.kv.open.came("open")
    await caller.no_hand_off(quiet_s(), "the shard has not answered open")
    expect(not d.streams[0].chunks, "no chunk before opened", len(d.streams[0].chunks))
    d.go()
    await caller.handed_off()


@case(303, "CRC-32C (Castagnoli) of the payload.")
async def checksums_are_right(p: PrefillHand) -> None:
    """Every chunk of a prompt of five blocks carries the CRC-32C of its payload."""
    d = await p.decode()
    request = p.request(p.blocks(5))
    await p.call(request, d).handed_off()
    expect((await d.granted(request.ref)).complete, "all KV, verified", "some")


@case(
    304,
    "With TransferOpen.kv_format canonical the payload is, for each block of [block_start,"
    " block_start + block_count) in order, the block's canonical bytes restricted to layers"
    " [layer_start, layer_start + layer_count) of the group and to the heads that the stream"
    " brings, which are the sender's and the receiver's in common unless TransferOpen.sends"
    " says less:",
)
async def bytes_are_canonical(p: PrefillHand) -> None:
    """Every byte of the KV of five and a half blocks stands where the layout has it, by the sim's
    rule where P follows it; D's first block is enough to tell one prompt from another."""
    d = await p.decode()
    request = p.request(p.blocks(5.5))
    await p.call(request, d).handed_off()
    grant = await d.granted(request.ref)
    expect_kv(grant, p.rule, request.tokens)
    other = p.request(p.blocks(5.5))
    await p.call(other, d).handed_off()
    expect((await d.granted(other.ref)).kv != grant.kv, "another KV for another prompt", "the same")


@case(305, "First logical block; must lie within the ranges D wanted.")
async def only_what_is_wanted(p: PrefillHand) -> None:
    """D holds blocks 0, 1 and 3 of five and a half already; the three others come, and no more."""
    d = await p.decode()
    d.cached_blocks = {0, 1, 3}
    request = p.request(p.blocks(5.5))
    await p.call(request, d).handed_off()
    grant = await d.granted(request.ref)
    expect_equal(grant.wanted, {2, 4, 5}, "the wanted blocks")
    expect_kv(grant, p.rule, request.tokens)


@case(306, "A shard with nothing to send still opens and ends.")
async def nothing_is_wanted(p: PrefillHand) -> None:
    """D holds every block already: the Transfer is opened and ended with no chunk in it."""
    d = await p.decode()
    request = p.request()
    d.cached_blocks = set(range(len(request.prompt)))
    await p.call(request, d).handed_off()
    (stream,) = d.transfers(1)
    expect(stream.end is not None, "end", "none")
    expect_equal(stream.chunks, [], "the chunks")


@case(307, "Both sums count this stream alone, ranges sent again included;")
async def sums_are_of_the_stream(p: PrefillHand) -> None:
    """The sums of end are those of what came, on a stream that was opened again too."""
    d = await p.decode()
    d.kv.chunk.refuse(None, CONNECTION_LOST)
    await p.call(p.request(p.blocks(8)), d).handed_off()
    for stream in d.streams:
        if stream.end is not None:
            expect_equal(stream.end.chunks, len(stream.chunks), "end.chunks")
            expect_equal(stream.end.bytes, stream.bytes, "end.bytes")
    expect(d.streams[-1].end is not None, "end on the last stream", "none")


@case(
    308,
    "Payload bytes P may have sent on this stream and not seen acknowledged. One chunk may always"
    " be under way, however large; 0 allows no second one beside it.",
)
async def the_window_is_kept(p: PrefillHand) -> None:
    """With a window of 0, and with one of three blocks, P sends no more than that before the first
    acknowledgement, and all of it in the end."""
    for window in (0, 3 * p.layout.block_bytes):
        d = await p.decode()
        d.kv.window_bytes = window
        d.kv.chunk.hold()
        caller = p.call(p.request(p.blocks(10)), d)
        await d.kv.chunk.came("a chunk")
        await caller.no_hand_off(quiet_s(), "D has acknowledged nothing")
        d.go()
        await caller.handed_off()
        (stream,) = d.transfers(1)
        expect(stream.excess <= window, f"at most {window} bytes unacknowledged", stream.excess)


@case(309, "P opens a stream that was lost again, and sends only what opened does not list.")
async def a_lost_stream_is_opened_again(p: PrefillHand) -> None:
    """The connection is lost after the first chunk was acknowledged; the second stream brings the
    rest, and nothing of what the shard had."""
    d = await p.decode()
    d.kv.window_bytes = 0
    d.kv.chunk.refuse(None, CONNECTION_LOST)
    request = p.request(p.blocks(8))
    await p.call(request, d).handed_off()
    first, second = d.transfers(2)
    expect_equal(second.open.grant_id, first.open.grant_id, "the grant_id of the second open")
    expect(bool(second.listed), "something verified on the first stream", "nothing")
    listed = {(r.group, r.layer_start, r.block_start) for r in second.listed}
    again = listed & _places(second)
    expect(not again, "nothing that opened listed", f"{len(again)} block-layers of it")
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


@case(310, "0 when an earlier stream had sent everything.")
async def a_stream_lost_at_its_end(p: PrefillHand) -> None:
    """The connection is lost between end and completed; the second stream has no chunk and an end
    whose sums are 0."""
    d = await p.decode()
    d.kv.end.refuse(CONNECTION_LOST)
    await p.call(p.request(), d).handed_off()
    _, second = d.transfers(2)
    expect_equal(second.end, transfer_pb2.TransferEnd(), "the end of the second stream")


@case(311, "D's shards, at least one; each serves TransferService at its own endpoint.")
async def each_shard_gets_its_layers(p: PrefillHand) -> None:
    """D has two shards that share the layers between them: each gets its own layers, named by its
    index, and both are ended before the hand-off."""
    layers = sum(group.layers for group in p.layout.groups)
    cut = max(1, layers // 2)
    shards = [layout_pb2.Shard(tp_size=1)]
    if layers > cut:
        runs = ((0, cut), (cut, layers - cut))
        shards = [
            layout_pb2.Shard(
                tp_size=1, pp_rank=rank, pp_size=2, layer_start=first, layer_count=count
            )
            for rank, (first, count) in enumerate(runs)
        ]
    d = await p.decode(shards=shards)
    request = p.request()
    await p.call(request, d).handed_off()
    by_index = sorted((stream.shard, stream.open.shard_index) for stream in d.streams)
    expect_equal(by_index, [(i, i) for i in range(len(shards))], "(shard, shard_index) of each")
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


@case(312, "Shards to send to; the same as in Welcome unless narrowed.")
async def the_grant_says_where_to_send(p: PrefillHand) -> None:
    """Welcome lists a second shard where nobody listens, the grant does not: the KV goes to the one
    in the grant."""
    d = await p.decode()
    away = layout_pb2.Shard(tp_size=1, endpoint=p.closed_endpoint())
    d.hello.answer["shards"] = [away, *d.shards]
    request = p.request()
    await p.call(request, d).handed_off()
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


@case(313, "DATA_LOSS with KV_CORRUPT for a wrong checksum;")
async def corrupt_kv_reaches_the_caller(p: PrefillHand) -> None:
    """D finds a checksum wrong: the caller hears KV_CORRUPT, and no other stream is opened."""
    d = await p.decode()
    d.kv.chunk.refuse(Fault(Reason.KV_CORRUPT, "the checksum is wrong", {"layers": "0..1"}))
    await p.call(p.request(), d).fails(Reason.KV_CORRUPT, "D found KV corrupt")
    d.transfers(1)


@case(314, "P ends a transfer whose shard is silent for longer.")
async def a_silent_shard(p: PrefillHand) -> None:
    """The shard acknowledges nothing for Welcome.kv_progress: the caller hears DECODE_LOST, for its
    own time is not over and another D may take the request, and D is released."""
    d = await p.decode(KitTimes(kv_progress=0.3))
    d.kv.chunk.hold()
    caller = p.call(p.request(), d)
    limit = d.times.kv_progress + answer_s()
    await caller.fails(Reason.DECODE_LOST, "the shard is silent", limit)
    await d.release.came("Release")


@case(315, "The client hears BAD_REQUEST as INTERNAL, for it is P's.")
async def a_bad_chunk_is_not_the_callers(p: PrefillHand) -> None:
    """D finds a chunk out of bounds: the caller, whose request was right, is not told
    INVALID_ARGUMENT."""
    d = await p.decode()
    d.kv.chunk.refuse(bad_request([FieldError("block_start", "out of bounds")]))
    ended = await p.call(p.request(), d).ends()
    expect(bool(d.kv.chunk.seen), "a chunk that D finds out of bounds", str(ended))
    expect(ended is not None, "a failed call", "OK")
    code = ended.code if ended is not None else Code.OK
    expect(code is not Code.INVALID_ARGUMENT, "another code than INVALID_ARGUMENT", str(ended))


@case(316, "Any other process of D refuses it with FAILED_PRECONDITION, STALE_EPOCH.")
async def a_refusal_at_open(p: PrefillHand) -> None:
    """The shard refuses open with a word of its own: the caller hears DECODE_LOST, for the process
    that had granted is gone, and no other stream is opened."""
    d = await p.decode()
    d.kv.open.refuse(Fault(Reason.STALE_EPOCH, "another process"))
    await p.call(p.request(), d).fails(Reason.DECODE_LOST, "the shard refused open")
    d.transfers(1)


@case(
    317,
    "A grant has one stream for each pair of a shard of P and a shard of D that hold some layer and"
    " head in common, to the shard of D, and TransferOpen.sends names the layers and heads that"
    " come on it.",
)
async def each_shard_gets_its_heads(p: PrefillHand) -> None:
    """D has two shards that share the heads between them: each gets its own heads of every layer
    and block, as open says, and both are ended before the hand-off."""
    if heads_of(p.layout) % 2:
        raise NotApplicable("the heads of P's layout cannot be halved")
    halves = cut(p.layout, 2, 1)
    d = await p.decode(shards=[half.to_proto() for half in halves])
    request = p.request()
    await p.call(request, d).handed_off()
    sent = sorted((s.shard, part_of(s.open.sends, p.layout)) for s in d.streams)
    expect_equal(sent, [(i, half.part) for i, half in enumerate(halves)], "(shard, sends) of each")
    expect_kv(await d.granted(request.ref), p.rule, request.tokens)


def _places(stream: IncomingKv) -> set[tuple[int, int, int]]:
    """Group, layer and block of all that a stream brought."""
    return {
        (chunk.group, layer, block)
        for chunk in stream.chunks
        for layer in range(chunk.layer_start, chunk.layer_start + chunk.layer_count)
        for block in range(chunk.block_start, chunk.block_start + chunk.block_count)
    }
