"""D13x: layouts, shards and hashes that do not fit, let in; and those that do, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.decode import sessions
from pd_grpc.decode.sessions import Sessions
from pd_grpc.protocol import shards
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.layout import KvLayout, Mismatch
from pd_grpc.v1 import layout_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def _blind_to(patch: pytest.MonkeyPatch, *fields: str) -> None:
    """Layouts are compared without these fields."""
    right = KvLayout.differences

    def differences(self, theirs):  # type: ignore[no-untyped-def]
        return [d for d in right(self, theirs) if d.field.rsplit(".", 1)[-1] not in fields]

    patch.setattr(KvLayout, "differences", differences)


@mutant("D130")
def models_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "model")


@mutant("D130")
def position_encodings_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "positions")


@mutant("D131")
def head_dims_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "head_dim")


@mutant("D131")
def ours_and_theirs_are_swapped(patch: pytest.MonkeyPatch) -> None:
    right = sessions._mismatch
    patch.setattr(sessions, "_mismatch", lambda field, ours, theirs: right(field, theirs, ours))


@mutant("D132")
def element_types_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "dtype")


@mutant("D133")
def planes_are_compared_as_far_as_they_go(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "planes")


@mutant("D133")
def groups_are_compared_as_far_as_they_go(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "groups")


@mutant("D134")
def packings_are_compared(patch: pytest.MonkeyPatch) -> None:
    right = KvLayout.differences

    def differences(self, theirs):  # type: ignore[no-untyped-def]
        if self.format != theirs.format:
            return [Mismatch("format", self.format, theirs.format)]
        return right(self, theirs)

    patch.setattr(KvLayout, "differences", differences)


@mutant("D134")
def bytes_travel_as_p_has_them(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._carrier
    patch.setattr(
        Sessions,
        "_carrier",
        lambda self, hello, layout: replace(right(self, hello, layout), kv_format=layout.format),
    )


@mutant("D135")
def the_best_layout_alone_counts(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._chosen
    patch.setattr(Sessions, "_chosen", lambda self, offered: right(self, offered[:1]))


@mutant("D136")
def layouts_are_compared_as_written(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._layout_fault

    def layout_fault(self, offered):  # type: ignore[no-untyped-def]
        if not offered.format:
            return sessions._mismatch("layout.format", self._offer.layout.format, "")
        return right(self, offered)

    patch.setattr(Sessions, "_layout_fault", layout_fault)


@mutant("D137")
def what_is_not_built_merely_differs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "_unbuilt", lambda offered: None)


@mutant("D142")
def planes_are_refused_as_their_group(patch: pytest.MonkeyPatch) -> None:
    right = sessions._not_built

    def not_built(field, kind):  # type: ignore[no-untyped-def]
        return right(field.split(".planes")[0], kind)

    patch.setattr(sessions, "_not_built", not_built)


@mutant("D138")
def an_unknown_kind_is_malformed(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._layout_fault

    def layout_fault(self, offered):  # type: ignore[no-untyped-def]
        kinds = {plane.kind for group in offered.groups for plane in group.planes}
        if kinds - {*layout_pb2.PlaneKind.values()}:
            return Fault(Reason.BAD_REQUEST, "no such kind")
        return right(self, offered)

    patch.setattr(Sessions, "_layout_fault", layout_fault)


@mutant("D143")
def sliding_groups_are_not_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "_BUILT_GROUPS", (0, layout_pb2.KV_GROUP_KIND_FULL))


@mutant("D143")
def windows_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "window")


@mutant("D144")
def scales_are_not_built(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "_BUILT_PLANES", (layout_pb2.PLANE_KIND_K, layout_pb2.PLANE_KIND_V))


@mutant("D144")
def kinds_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    _blind_to(patch, "kind")


@mutant("D139")
def any_hash(patch: pytest.MonkeyPatch) -> None:
    right = sessions._check_means

    def check_means(hello):  # type: ignore[no-untyped-def]
        hello.ClearField("hash_algorithm")
        right(hello)

    patch.setattr(sessions, "_check_means", check_means)


@mutant("D140")
def any_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "shards_problem", lambda shards, layout: None)


@mutant("D141")
def a_part_is_as_good_as_the_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shards, "_cover_problem", lambda places, layout: None)
