"""How an instance's KV is cut over its shards, and what two of them have in common.

Layers are counted over all groups and heads over the model, as `layout.proto` counts them. A layout
whose planes differ in their number of heads has one head here, which cannot be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_grpc.protocol.layout import KvLayout, Mismatch
from pd_grpc.v1 import layout_pb2


class Part(NamedTuple):
    """A rectangle of every block: layers `[layer, layer + layers)` of the heads
    `[head, head + heads)`."""

    layer: int
    layers: int
    head: int
    heads: int

    @property
    def area(self) -> int:
        """Its layers times its heads."""
        return self.layers * self.heads

    def within(self, other: Part) -> bool:
        """Whether the other has all of it."""
        return self.common(other) == self

    def common(self, other: Part) -> Part:
        """What both have; NOTHING when that is nothing."""
        layer, head = max(self.layer, other.layer), max(self.head, other.head)
        layers = min(self.layer + self.layers, other.layer + other.layers) - layer
        heads = min(self.head + self.heads, other.head + other.heads) - head
        return Part(layer, layers, head, heads) if layers > 0 and heads > 0 else NOTHING

    def runs(self, layout: KvLayout) -> list[tuple[int, int, int]]:
        """Its layers group by group: (group, first layer within the group, layers)."""
        found, before = [], 0
        for g, group in enumerate(layout.groups):
            first = max(self.layer, before)
            end = min(self.layer + self.layers, before + group.layers)
            if first < end:
                found.append((g, first - before, end - first))
            before += group.layers
        return found

    def layer_bytes(self, layout: KvLayout, group: int) -> int:
        """Bytes of its heads of one block in one layer of `group`."""
        return layout.layer_bytes(group) * self.heads // heads_of(layout)

    def block_bytes(self, layout: KvLayout) -> int:
        """Bytes of it in one block."""
        return sum(self.layer_bytes(layout, g) * layers for g, _, layers in self.runs(layout))

    def to_proto(self) -> layout_pb2.KvPart:
        """As sent on the wire."""
        return layout_pb2.KvPart(
            layer_start=self.layer,
            layer_count=self.layers,
            head_start=self.head,
            head_count=self.heads,
        )


NOTHING = Part(0, 0, 0, 0)

MAX_SHARDS = 256
"""Of one instance: each is compared with each."""


@dataclass(frozen=True)
class Place:
    """A shard's place among those of its instance, and what it holds."""

    part: Part
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __str__(self) -> str:
        """For people."""
        return f"tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}"

    def to_proto(self) -> layout_pb2.Shard:
        """As sent on the wire, without endpoint and metadata; of an instance's only shard the size
        alone is told, for the ranges then go without saying."""
        if self.tp_size == self.pp_size == 1:
            return layout_pb2.Shard(tp_size=1)
        return layout_pb2.Shard(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            layer_start=self.part.layer,
            layer_count=self.part.layers,
            head_start=self.part.head,
            head_count=self.part.heads,
        )


def heads_of(layout: KvLayout) -> int:
    """Into how many heads every plane can be cut."""
    counts = {plane.heads for group in layout.groups for plane in group.planes}
    return counts.pop() if len(counts) == 1 else 1


def layers_of(layout: KvLayout) -> int:
    """Layers of all groups."""
    return sum(group.layers for group in layout.groups)


def whole(layout: KvLayout) -> Part:
    """All there is."""
    return Part(0, layers_of(layout), 0, heads_of(layout))


def place_of(shard: layout_pb2.Shard, layout: KvLayout) -> Place:
    """A shard as a message has it, with defaults filled in; not checked."""
    return Place(
        Part(
            shard.layer_start,
            shard.layer_count or max(0, layers_of(layout) - shard.layer_start),
            shard.head_start,
            shard.head_count or max(0, heads_of(layout) - shard.head_start),
        ),
        shard.tp_rank,
        shard.tp_size or 1,
        shard.pp_rank,
        shard.pp_size or 1,
    )


def part_of(message: layout_pb2.KvPart, layout: KvLayout) -> Part:
    """A part as a message has it, with defaults filled in; not checked."""
    if not message.layer_count:
        return NOTHING
    heads = message.head_count or max(0, heads_of(layout) - message.head_start)
    return Part(message.layer_start, message.layer_count, message.head_start, heads)


def places_of(shards: Sequence[layout_pb2.Shard], layout: KvLayout) -> tuple[Place, ...]:
    """The shards of an instance; without any, the one that holds everything."""
    return tuple(place_of(shard, layout) for shard in shards) or (Place(whole(layout)),)


def cut(layout: KvLayout, tp: int, pp: int) -> tuple[Place, ...]:
    """An instance's shards as tensor and pipeline parallelism cut a model: each pipeline rank has
    a run of layers, of equal lengths as far as that goes; each tensor rank in it a run of heads, or
    where there are more ranks than heads one that others have as well. In the order of pipeline
    rank, then tensor rank. ValueError when heads and ranks divide neither way, or there are fewer
    layers than ranks."""
    layers, heads = layers_of(layout), heads_of(layout)
    if pp > layers:
        raise ValueError(f"pp: {pp} ranks for {layers} layers")
    if tp > 1 and heads % tp and tp % heads:
        raise ValueError(f"tp: {heads} heads cannot be cut into {tp}")
    places = []
    for stage in range(pp):
        first, end = layers * stage // pp, layers * (stage + 1) // pp
        for rank in range(tp):
            head, count = heads * rank // tp, max(1, heads // tp)
            part = Part(first, end - first, head, count)
            places.append(Place(part, rank, tp, stage, pp))
    return tuple(places)


_UNBUILT = ("cp_rank", "cp_size", "dp_rank", "dp_size")


def unbuilt_part(shard: layout_pb2.Shard) -> Mismatch | None:
    """The first field by which a shard is one of several in a way that is not built."""
    for field in _UNBUILT:
        ours, theirs = int(field.endswith("size")), getattr(shard, field)
        if theirs not in (0, ours):
            return Mismatch(field, str(ours), str(theirs))
    return None


def shards_problem(shards: Sequence[layout_pb2.Shard], layout: KvLayout) -> Mismatch | None:
    """The first field by which shards do not fit together, or not the layout; None if they do."""
    for i, shard in enumerate(shards):
        unbuilt = unbuilt_part(shard)
        if unbuilt is not None:
            return Mismatch(f"shards[{i}].{unbuilt.field}", unbuilt.ours, unbuilt.theirs)
    if len(shards) > MAX_SHARDS:
        return Mismatch("shards", f"at most {MAX_SHARDS}", str(len(shards)))
    places = places_of(shards, layout)
    ranks = places[0].tp_size * places[0].pp_size
    if len(places) != ranks:
        return Mismatch("shards", str(ranks), str(len(places)))
    seen: set[tuple[int, int]] = set()
    for i, place in enumerate(places):
        problem = _place_problem(place, places[0], layout)
        if problem is None and (place.pp_rank, place.tp_rank) in seen:
            problem = Mismatch("tp_rank", "each pair of ranks once", str(place))
        if problem is not None:
            return Mismatch(f"shards[{i}].{problem.field}", problem.ours, problem.theirs)
        seen.add((place.pp_rank, place.tp_rank))
    return _cover_problem(places, layout)


def _place_problem(place: Place, first: Place, layout: KvLayout) -> Mismatch | None:
    """What is wrong with one of them by itself."""
    for field in ("tp_size", "pp_size"):
        ours, theirs = getattr(first, field), getattr(place, field)
        if ours != theirs:
            return Mismatch(field, str(ours), str(theirs))
    for kind in ("tp", "pp"):
        rank, size = getattr(place, f"{kind}_rank"), getattr(place, f"{kind}_size")
        if rank >= size:
            return Mismatch(f"{kind}_rank", f"below {size}", str(rank))
    part, all_of_it = place.part, whole(layout)
    for name, start, count, most in (
        ("layer", part.layer, part.layers, all_of_it.layers),
        ("head", part.head, part.heads, all_of_it.heads),
    ):
        if start >= most:
            return Mismatch(f"{name}_start", f"below {most}", str(start))
        if start + count > most:
            return Mismatch(f"{name}_count", f"[0, {most})", f"[{start}, {start + count})")
    return None


def _cover_problem(places: Sequence[Place], layout: KvLayout) -> Mismatch | None:
    """Where two of them overlap without being equal, or what none of them has."""
    distinct: list[Part] = []
    for i, place in enumerate(places):
        if place.part in distinct:
            continue
        for other in distinct:
            if place.part.common(other).area:
                field = "layer_start" if place.part.layer != other.layer else "head_start"
                name = field.removesuffix("_start")
                ours, theirs = getattr(other, name), getattr(place.part, name)
                return Mismatch(f"shards[{i}].{field}", str(ours), str(theirs))
        distinct.append(place.part)
    held, wanted = sum(part.area for part in distinct), whole(layout).area
    if held != wanted:
        if len(places) == 1:
            return _lacking(places[0].part, whole(layout))
        return Mismatch("shards", f"{wanted} heads of layers held", f"{held} held")
    return None


def _lacking(part: Part, all_of_it: Part) -> Mismatch:
    """What the only shard lacks."""
    fields = {"layer_start": "layer", "layer_count": "layers"}
    fields |= {"head_start": "head", "head_count": "heads"}
    for field, name in fields.items():
        ours, theirs = getattr(all_of_it, name), getattr(part, name)
        if ours != theirs:
            return Mismatch(f"shards[0].{field}", str(ours), str(theirs))
    raise AssertionError("it lacks nothing")
