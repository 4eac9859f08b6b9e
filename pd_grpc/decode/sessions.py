"""The Ps that D knows: who they are, whether they live, and which session is theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pd_grpc.decode.carrier import INLINE_CARRIER, Carrier
from pd_grpc.decode.transfer import Owner
from pd_grpc.protocol.block_hashes import HASH_ALGORITHM
from pd_grpc.protocol.config import Timeouts
from pd_grpc.protocol.faults import Fault, Reason, bad_request, not_meant
from pd_grpc.protocol.layout import BUILT_GROUPS, BUILT_PLANES, CANONICAL, KvLayout
from pd_grpc.protocol.messages import (
    duration,
    layout_from_proto,
    layout_to_proto,
    plain_transport,
    transport_name,
)
from pd_grpc.protocol.refs import name_errors
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.protocol.shards import Place, places_of, shards_problem
from pd_grpc.v1 import decode_pb2, layout_pb2, types_pb2

_BUILT_GROUPS = frozenset({0, *(kind.value for kind in BUILT_GROUPS)})
_BUILT_PLANES = frozenset(kind.value for kind in BUILT_PLANES)

NAMES_REMEMBERED = 4096
"""Ps whose greatest epoch is known, the latest seen of them."""


@dataclass
class Session:
    """One P's standing conversation; `stream` is None while it is broken, `features` are those that
    both sides have, `layout` is P's, `carrier` is how KV comes, `senders` are P's shards, `load` is
    what P was told last."""

    session_id: str
    owner: Owner
    stream: int | None
    layout: KvLayout
    features: frozenset[str] = frozenset()
    carrier: Carrier = INLINE_CARRIER
    senders: tuple[Place, ...] = ()
    load: decode_pb2.Load | None = None


@dataclass(frozen=True)
class Offer:
    """What D offers in every Welcome; `carriers` best first."""

    instance: types_pb2.Instance
    layout: KvLayout
    shards: Sequence[layout_pb2.Shard]
    features: frozenset[str]
    max_model_len: int
    timeouts: Timeouts
    carriers: Sequence[Carrier] = (INLINE_CARRIER,)


@dataclass(frozen=True)
class Joined:
    """A P was taken in. `replaced` is its earlier session, `outlived` an earlier process of it."""

    session: Session
    welcome: decode_pb2.Welcome
    replaced: Session | None
    outlived: Session | None


class Sessions:
    """Sessions by P's name. Of one name only the greatest epoch is known, and of that only the
    newest session."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._by_name: dict[str, Session] = {}
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._by_id: dict[str, Session] = {}
        self._by_stream: dict[int, Session] = {}

    @property
    def shards(self) -> Sequence[layout_pb2.Shard]:
        """D's shards, without what a transport has to add."""
        return self._offer.shards

    def join(self, stream: int, hello: decode_pb2.Hello, session_id: str) -> Joined:
        """Take a P in. Fault when it is malformed, meant for another, stale or unlike us."""
        self._check(hello)
        owner = Owner(hello.instance.name, hello.instance.epoch)
        newest = self._newest.get(owner.name, 0)
        if newest > owner.epoch:
            raise Fault(
                Reason.STALE_EPOCH,
                f"prefill {owner.name} has a newer process",
                {"epoch": str(owner.epoch), "newest": str(newest)},
            )
        self._remember(owner)
        known = self._by_name.get(owner.name)
        features = self._offer.features & set(hello.features)
        layout = self._chosen(hello.layouts)
        carrier = self._carrier(hello, layout)
        senders = places_of(hello.shards, self._offer.layout)
        session = Session(session_id, owner, stream, layout, features, carrier, senders)
        if known is not None:
            self.forget(known)
        self._by_name[owner.name] = session
        self._by_id[session_id] = session
        self._by_stream[stream] = session
        same = known is not None and known.owner == owner
        return Joined(
            session,
            self._welcome(session),
            replaced=known if same else None,
            outlived=None if same else known,
        )

    def of_stream(self, stream: int) -> Session | None:
        """The session that lives on a stream; None once it was superseded."""
        return self._by_stream.get(stream)

    def of_call(self, session_id: str) -> Session:
        """The session a call names. Fault NO_SESSION when it is unknown or superseded."""
        session = self._by_id.get(session_id)
        if session is None:
            raise Fault(Reason.NO_SESSION, "the session is unknown or superseded: open a new one")
        return session

    def of_owner(self, owner: Owner) -> Session | None:
        """The session of a P process."""
        session = self._by_name.get(owner.name)
        return session if session is not None and session.owner == owner else None

    def broke(self, session: Session) -> None:
        """Its stream is gone; it is known until `forget`."""
        if session.stream is not None:
            self._by_stream.pop(session.stream, None)
            session.stream = None

    def forget(self, session: Session) -> None:
        """It is over."""
        self.broke_quietly(session)
        self._by_id.pop(session.session_id, None)
        if self._by_name.get(session.owner.name) is session:
            del self._by_name[session.owner.name]

    def broke_quietly(self, session: Session) -> None:
        """Take it off its stream but let it remember which one that was."""
        if session.stream is not None:
            self._by_stream.pop(session.stream, None)

    def live(self) -> list[Session]:
        """Every session with a stream."""
        return list(self._by_stream.values())

    def _remember(self, owner: Owner) -> None:
        """A process that was replaced must not come back once its successor is gone too."""
        self._newest[owner.name] = owner.epoch
        self._newest.move_to_end(owner.name)
        while len(self._newest) > NAMES_REMEMBERED:
            self._newest.popitem(last=False)

    def _check(self, hello: decode_pb2.Hello) -> None:
        wrong = name_errors(hello.instance.name, "hello.instance.name", required=True)
        if hello.instance.epoch == 0:
            wrong.append(FieldError("hello.instance.epoch", "must not be 0"))
        if hello.instance.role != types_pb2.ROLE_PREFILL:
            wrong.append(FieldError("hello.instance.role", "must be ROLE_PREFILL"))
        if not hello.layouts:
            wrong.append(FieldError("hello.layouts", "must have at least one"))
        if wrong:
            raise bad_request(wrong)
        ours = self._offer.instance
        if hello.decode_name and hello.decode_name != ours.name:
            text = f"this is {ours.name}, not {hello.decode_name}"
            raise not_meant(Reason.WRONG_INSTANCE, text, hello.decode_name, ours.name)
        layout = self._chosen(hello.layouts)
        _check_means(hello)
        self._carrier(hello, layout)
        problem = shards_problem(hello.shards, self._offer.layout)
        if problem is not None:
            raise _mismatch(problem.field, problem.ours, problem.theirs)

    def _carrier(self, hello: decode_pb2.Hello, layout: KvLayout) -> Carrier:
        """The best that both have, with the format that P's layout and ours share; where they share
        none only INLINE moves the bytes. Fault when there is no such. Where either has several
        shards P writes to the memory of none, and the bytes are canonical."""
        several = len(hello.shards) > 1 or len(self._offer.shards) > 1
        theirs = {plain_transport(t) for t in hello.transports} or {layout_pb2.TRANSPORT_INLINE}
        formats = {layout.format, self._offer.layout.format}
        kv_format = layout.format if len(formats) == 1 and not several else CANONICAL
        carriers = [
            carrier
            for carrier in self._offer.carriers
            if not (several and carrier.one_sided)
            and (formats == {kv_format} or carrier.transport == layout_pb2.TRANSPORT_INLINE)
        ]
        for carrier in carriers:
            if carrier.transport in theirs:
                return replace(carrier, kv_format=kv_format)
        names = ", ".join(transport_name(t) for t in hello.transports)
        ours = ", ".join(transport_name(c.transport) for c in carriers)
        raise _mismatch("transports", ours, names)

    def _chosen(self, offered: Sequence[layout_pb2.KvLayout]) -> KvLayout:
        """The first one that is ours, or that is but for its format; without either, P hears what
        is wrong with its best."""
        faults, fitting = [], []
        for message in offered:
            fault = self._layout_fault(message)
            if fault is None:
                fitting.append(layout_from_proto(message))
            else:
                faults.append(fault)
        if not fitting:
            raise faults[0]
        return next((layout for layout in fitting if layout == self._offer.layout), fitting[0])

    def _layout_fault(self, offered: layout_pb2.KvLayout) -> Fault | None:
        unbuilt = _unbuilt(offered)
        if unbuilt is not None:
            return unbuilt
        differences = self._offer.layout.differences(layout_from_proto(offered))
        if not differences:
            return None
        first = differences[0]
        return _mismatch(f"layout.{first.field}", first.ours, first.theirs)

    def _welcome(self, session: Session) -> decode_pb2.Welcome:
        offer, timeouts = self._offer, self._offer.timeouts
        return decode_pb2.Welcome(
            instance=offer.instance,
            session_id=session.session_id,
            features=sorted(session.features),
            layout=layout_to_proto(session.layout),
            kv_format=session.carrier.kv_format,
            transport=plain_transport(session.carrier.transport),
            shards=[session.carrier.shard(shard) for shard in offer.shards],
            lease=duration(timeouts.lease_s),
            grace=duration(timeouts.grace_s),
            heartbeat=duration(timeouts.heartbeat_s),
            max_model_len=offer.max_model_len,
            kv_progress=duration(timeouts.kv_progress_s),
            first_token=duration(timeouts.first_token_s),
            attach=duration(timeouts.attach_s),
            tombstone=duration(timeouts.tombstone_s),
        )


def _unbuilt(offered: layout_pb2.KvLayout) -> Fault | None:
    """The first kind of a group or plane that is not built, or not known, by its path."""
    for g, group in enumerate(offered.groups):
        if group.kind not in _BUILT_GROUPS:
            return _not_built(f"layout.groups[{g}].kind", group.kind)
        for p, plane in enumerate(group.planes):
            if plane.kind not in _BUILT_PLANES:
                return _not_built(f"layout.groups[{g}].planes[{p}].kind", plane.kind)
    return None


def _not_built(field: str, kind: int) -> Fault:
    text = f"{field} {kind}: only FULL and SLIDING groups with planes K, V and SCALE are built"
    return Fault(Reason.FEATURE, text, {"feature": field})


def _check_means(hello: decode_pb2.Hello) -> None:
    if hello.hash_algorithm not in ("", HASH_ALGORITHM):
        raise _mismatch("hash_algorithm", HASH_ALGORITHM, hello.hash_algorithm)


def _mismatch(field: str, ours: str, theirs: str) -> Fault:
    return Fault(
        Reason.LAYOUT_MISMATCH,
        f"{field} differs: {ours} on D, {theirs} on P",
        {"field": field, "ours": ours, "theirs": theirs},
    )
