"""Whether P can talk to a D that has taken it in."""

from __future__ import annotations

from pd_grpc.prefill.grants import format_problem
from pd_grpc.protocol.faults import Fault, Reason, not_meant
from pd_grpc.protocol.layout import CANONICAL, KvLayout
from pd_grpc.protocol.messages import INLINE, layout_from_proto, transport_name
from pd_grpc.v1 import decode_pb2


def objection(
    welcome: decode_pb2.Welcome, endpoint: str, name: str, layout: KvLayout, offered: frozenset[int]
) -> Fault | None:
    """What keeps us from talking to the D at `endpoint`, which itself has nothing against us.

    It is meant by `name`, empty for any; our hello had our `layout` and the transports `offered`.
    """
    missing = _missing(welcome)
    if missing:
        text = f"{endpoint} sent a welcome without {missing}"
        return Fault(Reason.WRONG_STATE, text, {"field": f"welcome.{missing}"})
    try:
        differences = layout.differences(layout_from_proto(welcome.layout))
    except ValueError as error:
        return Fault(Reason.LAYOUT_MISMATCH, f"the layout chosen by {endpoint}: {error}")
    if differences:
        first = differences[0]
        return Fault(
            Reason.LAYOUT_MISMATCH,
            f"the KV layout of {endpoint} differs in {first.field}: "
            f"{first.ours} here, {first.theirs} there",
            {"field": first.field, "ours": first.ours, "theirs": first.theirs},
        )
    if welcome.transport not in INLINE and welcome.transport not in offered:
        theirs = transport_name(welcome.transport)
        ours = ", ".join(transport_name(t) for t in sorted(offered) if t)
        return Fault(
            Reason.LAYOUT_MISMATCH,
            f"{endpoint} chose transport {theirs}, which was not offered",
            {"field": "transport", "ours": ours, "theirs": theirs},
        )
    problem = format_problem(welcome.kv_format or CANONICAL, welcome.transport, layout)
    if problem is not None:
        return Fault(
            Reason.LAYOUT_MISMATCH,
            f"{endpoint} chose bytes that cannot be sent: {problem}",
            {"field": "kv_format", "ours": layout.format, "theirs": welcome.kv_format},
        )
    for feature in ("grant_needs_client", "first_token_by_decode"):
        if getattr(welcome, feature):
            text = f"{endpoint} asks for {feature}, which is not supported"
            return Fault(Reason.FEATURE, text, {"feature": f"welcome.{feature}"})
    if name and welcome.instance.name != name:
        here = welcome.instance.name
        text = f"{endpoint} is {here}, not {name}"
        return not_meant(Reason.WRONG_INSTANCE, text, name, here)
    return None


def _missing(welcome: decode_pb2.Welcome) -> str | None:
    """The first field without which nothing can be said to a D, if it is not there."""
    needed = {
        "instance.name": welcome.instance.name,
        "instance.epoch": welcome.instance.epoch,
        "session_id": welcome.session_id,
    }
    return next((field for field, value in needed.items() if not value), None)
