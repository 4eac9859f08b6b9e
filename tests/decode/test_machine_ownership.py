"""Who may touch a transfer: sessions, epochs, instances, attempts."""

from __future__ import annotations

import pytest

from pd_grpc.decode.states import DecodeState as S
from pd_grpc.protocol.faults import Code, Reason
from pd_grpc.v1 import inference_pb2
from tests.decode.harness import Harness
from tests.decode.messages import D_EPOCH, Request
from tests.decode.prefill_peer import Prefill

# Whose it is


def test_only_the_sessions_own_prefill_may_touch_a_transfer(d: Harness, p: Prefill) -> None:
    thief = Prefill(d, "thief")
    request = Request()
    client = d.generate(request)
    grant = p.granted(request)
    calls = [
        thief.allocate(request),
        thief.first_token(request, grant),
        thief.release(request),
    ]
    for call in calls:
        assert d.reason(call) is Reason.NOT_OWNER
        assert d.refused[call].code is Code.PERMISSION_DENIED
    assert thief.heartbeat(grant) == [grant], "another's grant is as good as unknown"
    d.receive(grant, request.tokens)
    p.first_token(request, grant)
    assert d.reason(thief.release(request)) is Reason.NOT_OWNER
    d.run()
    assert d.shown[client] == request.answer


def test_nobody_owns_a_request_that_is_prefilled_here(d: Harness, p: Prefill) -> None:
    request = Request()
    client = d.generate(request, local=True)
    (live,) = d.machine.ledger.transfers.values()
    local = Request(live.key.transfer_id)
    for call in (p.allocate(local), p.release(local)):
        assert d.reason(call) is Reason.NOT_OWNER
    d.run()
    assert d.shown[client] == request.answer


def test_a_call_needs_a_session(d: Harness, p: Prefill) -> None:
    request = Request()
    p.session_id = "s-none"
    for call in (p.allocate(request), p.first_token(request, "g"), p.release(request)):
        assert d.reason(call) is Reason.NO_SESSION
        assert d.refused[call].code is Code.FAILED_PRECONDITION


@pytest.mark.parametrize("epoch", [D_EPOCH - 1, D_EPOCH + 1, 0])
def test_a_ref_of_another_process_is_refused(d: Harness, p: Prefill, epoch: int) -> None:
    """S14."""
    request = Request(decode_epoch=epoch)
    for call in (p.allocate(request), p.first_token(request, "g"), p.release(request)):
        assert d.reason(call) is Reason.STALE_EPOCH
        assert d.refused[call].metadata == {"meant": str(epoch), "here": str(D_EPOCH)}
    if epoch:
        client = d.generate(request)
        assert d.reason(client) is Reason.STALE_EPOCH
        assert d.refused[client].code is Code.UNAVAILABLE


def test_a_client_need_not_know_the_epoch(d: Harness, p: Prefill) -> None:
    client = d.generate(Request(decode_epoch=0))
    p.hand_off(Request())
    d.run()
    assert d.shown[client] == Request().answer


def test_a_client_that_means_another_decode_is_refused(d: Harness) -> None:
    request = Request()
    handoff = inference_pb2.Handoff(ref=request.ref, decode_name="d-other")
    client = d.generate(request, handoff=handoff)
    assert d.reason(client) is Reason.WRONG_INSTANCE
    assert d.refused[client].code is Code.UNAVAILABLE


# Attempts


def test_a_newer_attempt_supersedes_even_from_another_prefill(d: Harness, p: Prefill) -> None:
    old, new = Request(), Request(attempt=2)
    client = d.generate(old)
    p.granted(old)
    other = Prefill(d, "p2")
    other.granted(new)
    assert d.reason(client) is Reason.SUPERSEDED
    assert d.refused[client].metadata == {"attempt": "1", "newest": "2"}
    (ended,) = d.ended_for(p.stream)
    assert ended.ref == old.ref and ended.status.code == Code.ABORTED
    assert d.reason(p.allocate(old)) is Reason.RELEASED
    assert d.state(attempt=2) is S.RESERVED
    other.release(new)


def test_a_newer_attempt_of_the_client_supersedes_what_is_decoded(d: Harness, p: Prefill) -> None:
    old, new = Request(), Request(attempt=2)
    client = d.generate(old)
    p.hand_off(old)
    newer = d.generate(new)
    assert d.reason(client) is Reason.SUPERSEDED
    d.run()
    p.hand_off(new)
    d.run()
    assert d.shown[newer] == new.answer
    assert d.shown[client] == old.answer[:1]


def test_an_older_attempt_is_refused(d: Harness, p: Prefill) -> None:
    old, new = Request(), Request(attempt=2)
    p.granted(new)
    calls = (p.allocate(old), d.generate(old), p.release(old), p.first_token(old, "g-old"))
    for call in calls:
        assert d.reason(call) is Reason.STALE_ATTEMPT
        assert d.refused[call].metadata == {"attempt": "1", "newest": "2"}
    p.release(new)
    assert d.reason(p.allocate(old)) is Reason.STALE_ATTEMPT, "the tombstone remembers"
