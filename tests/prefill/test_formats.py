"""Which bytes P sends: D's word, as far as P can keep to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_grpc.prefill.grants import format_problem
from pd_grpc.protocol.layout import CANONICAL, KvLayout
from pd_grpc.v1 import layout_pb2
from tests.decode.messages import LAYOUT

INLINE, SHM = layout_pb2.TRANSPORT_INLINE, layout_pb2.TRANSPORT_SHM
OWN = replace(LAYOUT, format="own")


@pytest.mark.parametrize(
    ("layout", "kv_format", "transport", "problem"),
    [
        (LAYOUT, CANONICAL, INLINE, None),
        (LAYOUT, CANONICAL, SHM, None),
        (OWN, "own", INLINE, None),
        (OWN, "own", SHM, None),
        (OWN, CANONICAL, INLINE, None),
        (OWN, CANONICAL, 0, None),
        (OWN, CANONICAL, SHM, "kv_format canonical goes inline alone: ours is own"),
        (OWN, "another", INLINE, "kv_format another is neither canonical nor ours, which is own"),
        (LAYOUT, "own", INLINE, "kv_format own is neither canonical nor ours, which is canonical"),
    ],
)
def test_what_can_be_sent(
    layout: KvLayout, kv_format: str, transport: int, problem: str | None
) -> None:
    assert format_problem(kv_format, transport, layout) == problem
