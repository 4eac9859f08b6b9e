"""D13x: layouts, shards and hashes that must fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pd_grpc.conformance.calls import check_feature, check_metadata
from pd_grpc.conformance.case import expect, expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import granted
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import INLINE
from pd_grpc.v1 import layout_pb2

Change = Callable[[layout_pb2.KvLayout], None]
Where = Callable[[layout_pb2.KvLayout], Any]
SLIDING = layout_pb2.KV_GROUP_KIND_SLIDING


@case(130, "equal strings mean that equal tokens give equal KV")
async def another_model(d: DecodeHand) -> None:
    """A layout of another model, or of another position encoding, is refused with both values."""
    for field in ("model", "positions"):
        await _differs(d, lambda layout: layout, field, "kit-another")


@case(
    131,
    "Two layouts are compared at Hello field by field, with defaults filled in; a difference is"
    " FAILED_PRECONDITION with reason LAYOUT_MISMATCH, the field and both values.",
)
async def another_shape(d: DecodeHand) -> None:
    """A layout with one more token in a block, layer, head or dimension is refused."""
    own = d.subject.info.layout
    plane = own.groups[0].planes[0]
    await _differs(d, lambda layout: layout, "block_size", own.block_size + 1)
    await _differs(d, _group, "layers", own.groups[0].layers + 1)
    await _differs(d, _plane, "heads", plane.heads + 1)
    await _differs(d, _plane, "head_dim", plane.head_dim + 1)


@case(
    132,
    "a difference is FAILED_PRECONDITION with reason LAYOUT_MISMATCH, the field and both values.",
)
async def another_element_type(d: DecodeHand) -> None:
    """A layout whose second plane has elements of another type is refused."""
    own = d.subject.info.layout.groups[0].planes[-1].dtype
    other = "float32" if own != "float32" else "float16"
    await _differs(d, lambda layout: layout.groups[0].planes[-1], "dtype", other)


@case(133, "Tensors kept per token, in their order within a layer; at least one.")
async def other_planes(d: DecodeHand) -> None:
    """A layout without the second plane, and one with a group more, are refused."""

    def without_values(layout: layout_pb2.KvLayout) -> None:
        del layout.groups[0].planes[-1]

    def with_another_group(layout: layout_pb2.KvLayout) -> None:
        layout.groups.add().CopyFrom(layout.groups[0])

    for field, change in (("planes", without_values), ("groups", with_another_group)):
        fault = await _refused(d, Reason.LAYOUT_MISMATCH, change)
        expect_equal(_last(fault), field, "metadata 'field', the last of its path,")


@case(
    134,
    "Anything else names an engine's own packing: equal formats travel as they are, unequal"
    " ones only inline and canonically, converted at the ends.",
)
async def another_packing(d: DecodeHand) -> None:
    """P has a packing that D does not: it is taken in, inline and canonically, and the blocks that
    it sends so are D's answer."""
    offered = _changed(d, lambda layout: setattr(layout, "format", "kit-packing"))
    p = d.new_prefill()
    transports = [layout_pb2.TRANSPORT_SHM, layout_pb2.TRANSPORT_INLINE]
    welcome = await p.join(layouts=[offered], transports=transports)
    expect_equal(welcome.layout, offered, "layout, P's own,")
    expect_equal(welcome.kv_format or "canonical", "canonical", "kv_format")
    expect(welcome.transport in INLINE, "transport INLINE", welcome.transport)
    h = await granted(d, d.request(2 * d.block_size + 1), p=p)
    expect_equal(h.grant.kv_format or "canonical", "canonical", "the grant's kv_format")
    await h.completes()


@case(
    135,
    "D takes its own layout if it is among them, or else the first that differs from it in format"
    " alone.",
)
async def own_layout_behind_another(d: DecodeHand) -> None:
    """D's own layout, listed behind one of another model, is the one chosen."""
    other = _changed(d, lambda layout: setattr(layout, "model", "kit-another"))
    p = d.new_prefill()
    welcome = await p.join(layouts=[other, d.subject.info.layout])
    expect_equal(welcome.layout, d.subject.info.layout, "layout, D's own,")


@case(136, "Two layouts are compared at Hello field by field, with defaults filled in")
async def defaults_are_filled_in(d: DecodeHand) -> None:
    """A layout that leaves out what the default says is the same as one that says it."""
    own = d.subject.info.layout

    def bare(layout: layout_pb2.KvLayout) -> None:
        if layout.format == "canonical":
            layout.format = ""
        for group in layout.groups:
            if group.kind == layout_pb2.KV_GROUP_KIND_FULL:
                group.kind = layout_pb2.KV_GROUP_KIND_UNSPECIFIED

    def spelt_out(layout: layout_pb2.KvLayout) -> None:
        layout.format = layout.format or "canonical"
        for group in layout.groups:
            group.kind = group.kind or layout_pb2.KV_GROUP_KIND_FULL

    for change in (bare, spelt_out):
        layout = _changed(d, change)
        await d.new_prefill().join(layouts=[layout])
    expect_equal(d.subject.info.layout, own, "layout")


@case(
    137,
    "UNIMPLEMENTED with FEATURE when the best layout has a group or plane that is not built and"
    " none of the others fits",
)
async def a_group_or_plane_not_built(d: DecodeHand) -> None:
    """A layout of a reserved kind of group, or with a reserved kind of plane, needs a feature."""
    for kind in (layout_pb2.KV_GROUP_KIND_INDEX, layout_pb2.KV_GROUP_KIND_LATENT):
        await _refused(d, Reason.FEATURE, _set(_group, "kind", kind))
    for plane in (layout_pb2.PLANE_KIND_STATE, layout_pb2.PLANE_KIND_LATENT):
        await _refused(d, Reason.FEATURE, _set(_plane, "kind", plane))
    exotic = _changed(d, _set(_group, "kind", layout_pb2.KV_GROUP_KIND_STATE))
    await d.new_prefill().join(layouts=[exotic, d.subject.info.layout])


@case(
    138,
    "A request with an enum value that the server does not know is refused: with FEATURE"
    " where the value names a way to do the thing (kind of a layout's group or plane,"
    " transport of a Transfer, direction), with BAD_REQUEST elsewhere.",
)
async def a_kind_of_a_later_version(d: DecodeHand) -> None:
    """A layout with a kind of group or plane that nobody knows yet needs a feature."""
    await _refused(d, Reason.FEATURE, _set(_group, "kind", UNKNOWN_VALUE))
    await _refused(d, Reason.FEATURE, _set(_plane, "kind", UNKNOWN_VALUE))


@case(
    139,
    "FAILED_PRECONDITION with LAYOUT_MISMATCH, the field and both values, when layout,"
    " transport, shards or hash algorithm do not fit, with STALE_EPOCH when a newer process"
    " of P has been seen, with WRONG_INSTANCE",
)
async def another_hash_algorithm(d: DecodeHand) -> None:
    """P whose block hashes are of another algorithm is refused with both names."""
    p = d.new_prefill()
    fault = await p.refused(Reason.LAYOUT_MISMATCH, "other hashes", hash_algorithm="kit-hash")
    check_metadata(fault, field="hash_algorithm", ours="sha256-128-chain", theirs="kit-hash")
    await p.join(hash_algorithm="sha256-128-chain")


@case(
    140,
    "Otherwise there are tp_size * pp_size of them, with equal sizes and each pair of ranks once;",
)
async def shards_that_do_not_add_up(d: DecodeHand) -> None:
    """P with two shards that call themselves the only one, with one of two alone, with a rank
    beyond its size or with one that is reserved, is refused."""
    one = layout_pb2.Shard()
    await _shards_refused(d, [one, one], "shards")
    for kind in ("tp", "pp"):
        await _shards_refused(d, [_shard(f"{kind}_size", 2)], "shards")
        await _shards_refused(d, [_shard(f"{kind}_rank", 1)], f"{kind}_rank")
    for kind in ("cp", "dp"):
        for field, value in ((f"{kind}_rank", 1), (f"{kind}_size", 2)):
            await _shards_refused(d, [_shard(field, value)], field)
    whole = layout_pb2.Shard(tp_size=1, pp_size=1, cp_size=1, dp_size=1)
    await d.new_prefill().join(shards=[whole])


@case(141, "every layer of every head is held by one at least")
async def a_shard_of_some_layers(d: DecodeHand) -> None:
    """P whose only shard lacks a layer or a head is refused; one that counts them all is not."""
    layers = sum(group.layers for group in d.subject.info.layout.groups)
    heads = d.subject.info.layout.groups[0].planes[0].heads
    part = {"layer_start": 1, "head_start": 1}
    part |= {"layer_count": layers - 1} if layers > 1 else {}
    part |= {"head_count": heads - 1} if heads > 1 else {}
    for field, value in part.items():
        p = d.new_prefill()
        shards = [_shard(field, value)]
        fault = await p.refused(Reason.LAYOUT_MISMATCH, f"shards with {field}", shards=shards)
        for side in ("field", "ours", "theirs"):
            expect(bool(fault.metadata.get(side)), f"metadata {side!r}", dict(fault.metadata))
    whole = layout_pb2.Shard(layer_count=layers, head_count=heads)
    await d.new_prefill().join(shards=[whole])


@case(
    142,
    "of a layout that is the path of the kind, such as layout.groups[0].planes[1].kind",
)
async def what_is_not_built_is_named(d: DecodeHand) -> None:
    """A layout with a kind of group or plane that is reserved, or of a later version, is refused
    with the kind's path."""
    last = len(d.subject.info.layout.groups[0].planes) - 1
    for kind in (layout_pb2.KV_GROUP_KIND_DRAFT, UNKNOWN_VALUE):
        fault = await _refused(d, Reason.FEATURE, _set(_group, "kind", kind))
        check_feature(fault, "layout.groups[0].kind")
    for kind in (layout_pb2.PLANE_KIND_STATE, UNKNOWN_VALUE):
        change = _set(lambda layout: layout.groups[0].planes[last], "kind", kind)
        fault = await _refused(d, Reason.FEATURE, change)
        check_feature(fault, f"layout.groups[0].planes[{last}].kind")


@case(
    143, "v1 builds FULL and SLIDING; a layout with another kind is refused at Hello with FEATURE."
)
async def attention_that_is_built_and_differs(d: DecodeHand) -> None:
    """A layout that has a SLIDING group where D's is FULL, or another window, differs."""
    groups = d.subject.info.layout.groups
    for g, group in enumerate(groups):
        other = {
            "kind": layout_pb2.KV_GROUP_KIND_FULL if group.window else SLIDING,
            "window": group.window + 1,
        }
        for field, value in other.items():
            await _told(d, _set(_group_at(g), field, value), field)


@case(144, "v1 builds K, V and SCALE; a layout with another is refused at Hello with FEATURE.")
async def planes_that_are_built_and_differ(d: DecodeHand) -> None:
    """A layout with a plane of scales that D does not have, or without one that it has, differs."""
    for g, group in enumerate(d.subject.info.layout.groups):
        last = len(group.planes) - 1
        other = layout_pb2.PLANE_KIND_SCALE
        if group.planes[last].kind == other:
            other = layout_pb2.PLANE_KIND_V
        await _told(d, _set(_plane_at(g, last), "kind", other), "kind")
        scale = layout_pb2.Plane(
            kind=layout_pb2.PLANE_KIND_SCALE,
            dtype="float32",
            heads=group.planes[0].heads,
            head_dim=1,
        )
        await _told(d, partial(_append, _group_at(g), scale), "planes")


def _group_at(g: int) -> Where:
    return lambda layout: layout.groups[g]


def _plane_at(g: int, p: int) -> Where:
    return lambda layout: layout.groups[g].planes[p]


def _append(where: Where, plane: layout_pb2.Plane, layout: layout_pb2.KvLayout) -> None:
    where(layout).planes.append(plane)


def _group(layout: layout_pb2.KvLayout) -> Any:
    return layout.groups[0]


def _plane(layout: layout_pb2.KvLayout) -> Any:
    return layout.groups[0].planes[0]


def _set(where: Callable[[layout_pb2.KvLayout], Any], field: str, value: object) -> Change:
    return lambda layout: setattr(where(layout), field, value)


def _changed(d: DecodeHand, change: Change) -> layout_pb2.KvLayout:
    """D's layout but for a change."""
    layout = layout_pb2.KvLayout()
    layout.CopyFrom(d.subject.info.layout)
    change(layout)
    return layout


async def _refused(d: DecodeHand, reason: Reason, change: Change) -> Fault:
    """The fault of a hello whose only layout is D's but for a change."""
    layout = _changed(d, change)
    return await d.new_prefill().refused(reason, "a layout unlike D's", layouts=[layout])


async def _differs(
    d: DecodeHand, where: Callable[[layout_pb2.KvLayout], Any], field: str, theirs: object
) -> None:
    """Broken unless a layout that differs in one field is refused with that field and both."""
    ours = getattr(where(d.subject.info.layout), field)
    fault = await _refused(d, Reason.LAYOUT_MISMATCH, _set(where, field, theirs))
    expect_equal(_last(fault), field, "metadata 'field', the last of its path,")
    check_metadata(fault, ours=ours, theirs=theirs)


async def _told(d: DecodeHand, change: Change, field: str) -> None:
    """Broken unless a layout that is D's but for a change is refused with the field it differs in
    and both values, whatever D calls them."""
    fault = await _refused(d, Reason.LAYOUT_MISMATCH, change)
    expect_equal(_last(fault), field, "metadata 'field', the last of its path,")
    ours, theirs = fault.metadata.get("ours"), fault.metadata.get("theirs")
    expect(ours != theirs, "metadata 'ours' and 'theirs', unequal", dict(fault.metadata))


def _last(fault: Fault) -> str:
    path = fault.metadata.get("field", "")
    return path.rsplit(".", 1)[-1]


def _shard(field: str, value: int) -> layout_pb2.Shard:
    shard = layout_pb2.Shard()
    setattr(shard, field, value)
    return shard


async def _shards_refused(d: DecodeHand, shards: list[layout_pb2.Shard], field: str) -> None:
    p = d.new_prefill()
    fault = await p.refused(Reason.LAYOUT_MISMATCH, f"shards with {field}", shards=shards)
    expect_equal(_last(fault), field, "metadata 'field', the last of its path,")
    for side in ("ours", "theirs"):
        expect(bool(fault.metadata.get(side)), f"metadata {side!r}", dict(fault.metadata))
