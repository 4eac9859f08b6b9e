"""AdminService over a real connection: listing, looking up, watching, releasing, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.admin import (
    MAX_PAGE_SIZE,
    MAX_RELEASE_REASON_CHARS,
    AdminService,
    ChangeFeed,
)
from pd_grpc.protocol.config import ServerConfig, Sizes, Timeouts
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2

DECODING, FINISHED = types_pb2.TRANSFER_STATE_DECODING, types_pb2.TRANSFER_STATE_FINISHED
RELEASED, WAITING = types_pb2.TRANSFER_STATE_RELEASED, types_pb2.TRANSFER_STATE_WAITING


def info(
    transfer_id: str, attempt: int = 1, state: types_pb2.TransferState = DECODING, age: float = 0
) -> admin_pb2.TransferInfo:
    ref = types_pb2.TransferRef(transfer_id=transfer_id, attempt=attempt)
    return admin_pb2.TransferInfo(ref=ref, state=state, age=duration(age))


def span(name: str, at_s: int, trace_id: str) -> admin_pb2.Span:
    made = admin_pb2.Span(name=name, trace_id=trace_id)
    made.start.FromSeconds(at_s)
    return made


class Instance:
    """An instance with a list of transfers, some in flight and some only remembered."""

    def __init__(self) -> None:
        self.in_flight: list[admin_pb2.TransferInfo] = []
        self.ended: list[admin_pb2.TransferInfo] = []
        self.drained_for: list[float | None] = []
        self.released_for: list[str] = []
        self.traces_kept = "3"

    def server_info(self) -> admin_pb2.ServerInfo:
        return admin_pb2.ServerInfo(
            instance=types_pb2.Instance(name="d0"), settings={"traces_kept": self.traces_kept}
        )

    async def peer_infos(self) -> list[admin_pb2.ServerInfo]:
        return [admin_pb2.ServerInfo(instance=types_pb2.Instance(name="p0"))]

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        return list(self.in_flight)

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        known = [t for t in (*self.in_flight, *self.ended) if t.ref.transfer_id == transfer_id]
        if attempt:
            known = [t for t in known if t.ref.attempt == attempt]
        return max(known, key=lambda t: t.ref.attempt, default=None)

    def release(self, transfer_id: str, attempt: int, reason: str) -> admin_pb2.TransferInfo | None:
        found = self.transfer(transfer_id, attempt)
        if found in self.in_flight and found is not None:
            self.end(found, RELEASED)
            self.released_for.append(reason)
        return found

    def spans(self, wanted: str) -> list[admin_pb2.Span]:
        return [span("a", 2, trace_id="t-1")] if wanted in ("t-1", "r-1") else []

    async def peer_spans(self, trace_id: str) -> list[admin_pb2.Span]:
        return [span("b", 1, trace_id)] if trace_id in ("t-1", "t-2") else []

    def drain(self, deadline_s: float | None) -> int:
        self.drained_for.append(deadline_s)
        return len(self.in_flight)

    def end(self, transfer: admin_pb2.TransferInfo, state: types_pb2.TransferState) -> None:
        self.in_flight.remove(transfer)
        transfer.state = state
        self.ended.append(transfer)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def feed() -> ChangeFeed:
    return ChangeFeed(queue=4)


@pytest.fixture
async def server(instance: Instance, feed: ChangeFeed) -> AsyncIterator[ControlServer]:
    server = ControlServer(ServerConfig(), "decode", ["pd_grpc.v1.AdminService"])
    service = AdminService(instance, feed)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server.server)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def admin(server: ControlServer) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    async with rpc.aio_channel(server.endpoint, Timeouts(), Sizes()) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def names(transfers: object) -> list[str]:
    return [t.ref.transfer_id for t in transfers]  # type: ignore[attr-defined]


def refusal(error: grpc.RpcError) -> Fault:
    fault = rpc.read_error(error)
    assert isinstance(fault, Fault)
    return fault


async def test_an_instance_describes_itself_and_its_peers_only_when_asked(
    admin: admin_pb2_grpc.AdminServiceStub,
) -> None:
    alone = await admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert alone.server.instance.name == "d0"
    assert not alone.peers
    both = await admin.GetServerInfo(admin_pb2.GetServerInfoRequest(peers=True))
    assert [peer.instance.name for peer in both.peers] == ["p0"]


async def test_transfers_are_listed_oldest_first_page_by_page(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info(f"t-{i}", age=10 - i) for i in range(5)]
    seen, token = [], ""
    for _ in range(3):
        request = admin_pb2.ListTransfersRequest(page_size=2, page_token=token)
        page = await admin.ListTransfers(request)
        seen.append(names(page.transfers))
        token = page.next_page_token
    assert seen == [["t-0", "t-1"], ["t-2", "t-3"], ["t-4"]]
    assert token == ""


async def test_a_page_begins_where_the_last_one_ended_though_that_transfer_has_ended_since(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info(f"t-{i}", age=10 - i) for i in range(5)]
    first = await admin.ListTransfers(admin_pb2.ListTransfersRequest(page_size=2))
    for ended in instance.in_flight[:2]:
        instance.end(ended, FINISHED)
    request = admin_pb2.ListTransfersRequest(page_size=2, page_token=first.next_page_token)
    second = await admin.ListTransfers(request)
    assert names(second.transfers) == ["t-2", "t-3"]


async def test_a_page_token_whose_transfer_is_forgotten_is_refused(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info(f"t-{i}", age=10 - i) for i in range(3)]
    first = await admin.ListTransfers(admin_pb2.ListTransfersRequest(page_size=1))
    del instance.in_flight[0]
    request = admin_pb2.ListTransfersRequest(page_token=first.next_page_token)
    with pytest.raises(grpc.RpcError) as refused:
        await admin.ListTransfers(request)
    fault = refusal(refused.value)
    assert fault.reason is Reason.BAD_REQUEST
    assert fault.fields[0].field == "page_token"
    assert "begin again" in fault.fields[0].description


async def test_only_the_states_asked_for_are_listed(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info("a"), info("b", state=WAITING), info("c")]
    page = await admin.ListTransfers(admin_pb2.ListTransfersRequest(states=[WAITING]))
    assert names(page.transfers) == ["b"]
    everything = await admin.ListTransfers(admin_pb2.ListTransfersRequest())
    assert names(everything.transfers) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (admin_pb2.ListTransfersRequest(page_size=MAX_PAGE_SIZE + 1), "page_size", "10000"),
        (admin_pb2.ListTransfersRequest(states=[DECODING, 0]), "states[1]", "0 is no state"),  # type: ignore[list-item]
        (admin_pb2.ListTransfersRequest(states=[99]), "states[0]", "99 is no state"),  # type: ignore[list-item]
        (admin_pb2.ListTransfersRequest(page_token="#1"), "page_token", "previous answer"),
        (admin_pb2.ListTransfersRequest(page_token="t-1"), "page_token", "previous answer"),
        (admin_pb2.ListTransfersRequest(page_token="t-1#²"), "page_token", "previous answer"),
    ],
)
async def test_a_listing_that_cannot_be_is_refused_by_field_and_limit(
    admin: admin_pb2_grpc.AdminServiceStub,
    request_: admin_pb2.ListTransfersRequest,
    field: str,
    limit: str,
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await admin.ListTransfers(request_)
    fault = refusal(refused.value)
    assert (fault.code, fault.reason) == (Code.INVALID_ARGUMENT, Reason.BAD_REQUEST)
    assert fault.fields[0].field == field
    assert limit in fault.fields[0].description


async def test_the_newest_attempt_is_looked_up_unless_one_is_named(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info("t", attempt=2)]
    instance.ended = [info("t", attempt=1, state=FINISHED)]
    newest = await admin.GetTransfer(admin_pb2.GetTransferRequest(transfer_id="t"))
    assert newest.transfer.ref.attempt == 2
    first = await admin.GetTransfer(admin_pb2.GetTransferRequest(transfer_id="t", attempt=1))
    assert first.transfer.state == FINISHED


async def test_an_unknown_transfer_is_not_found(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    for call in (
        admin.GetTransfer(admin_pb2.GetTransferRequest(transfer_id="t-9", attempt=3)),
        admin.ReleaseTransfer(admin_pb2.ReleaseTransferRequest(transfer_id="t-9", attempt=3)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            await call
        fault = refusal(refused.value)
        assert (fault.code, fault.reason) == (Code.NOT_FOUND, Reason.UNKNOWN_TRANSFER)
        assert "attempt 3 of t-9" in fault.message


async def test_a_malformed_transfer_id_is_refused(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    for call in (
        admin.GetTransfer(admin_pb2.GetTransferRequest()),
        admin.ReleaseTransfer(admin_pb2.ReleaseTransferRequest(transfer_id="a b")),
        admin.WatchTransfers(admin_pb2.WatchTransfersRequest(transfer_id="x" * 129)).read(),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            await call
        assert [wrong.field for wrong in refusal(refused.value).fields] == ["transfer_id"]


async def test_a_transfer_is_released_by_hand_once(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info("t")]
    request = admin_pb2.ReleaseTransferRequest(transfer_id="t", reason="maintenance")
    for _ in range(2):
        answer = await admin.ReleaseTransfer(request)
        assert answer.transfer.state == RELEASED
    assert instance.released_for == ["maintenance"]
    assert instance.in_flight == []


async def test_a_reason_too_long_for_a_status_is_refused_and_nothing_is_released(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info("t")]
    reason = "x" * (MAX_RELEASE_REASON_CHARS + 1)
    with pytest.raises(grpc.RpcError) as refused:
        await admin.ReleaseTransfer(
            admin_pb2.ReleaseTransferRequest(transfer_id="t", reason=reason)
        )
    assert refusal(refused.value).fields[0].field == "reason"
    assert len(instance.in_flight) == 1


async def test_drain_answers_at_once_with_what_is_in_flight(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    instance.in_flight = [info("a"), info("b")]
    assert (await admin.Drain(admin_pb2.DrainRequest())).transfers == 2
    assert (await admin.Drain(admin_pb2.DrainRequest(deadline=duration(0)))).transfers == 2
    assert (await admin.Drain(admin_pb2.DrainRequest(deadline=duration(1.5)))).transfers == 2
    assert instance.drained_for == [None, 0.0, 1.5]


async def test_a_negative_deadline_does_not_drain(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    request = admin_pb2.DrainRequest()
    request.deadline.seconds = -1
    with pytest.raises(grpc.RpcError) as refused:
        await admin.Drain(request)
    assert refusal(refused.value).fields[0].field == "deadline"
    assert instance.drained_for == []


Watch = grpc.aio.UnaryStreamCall[admin_pb2.WatchTransfersRequest, admin_pb2.WatchTransfersResponse]


async def watching(admin: admin_pb2_grpc.AdminServiceStub, transfer_id: str = "") -> Watch:
    """A watch that misses nothing from now on."""
    call: Watch = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(transfer_id=transfer_id))
    await call.initial_metadata()
    return call


async def read(call: Watch) -> tuple[str, int]:
    change = await call.read()
    assert isinstance(change, admin_pb2.WatchTransfersResponse)
    return change.transfer.ref.transfer_id, change.skipped


async def test_every_reader_sees_every_change_from_when_it_began(
    admin: admin_pb2_grpc.AdminServiceStub, feed: ChangeFeed
) -> None:
    feed.publish(info("before"))
    one, other = await watching(admin), await watching(admin, "b")
    for name in ("a", "b"):
        feed.publish(info(name))
    assert [await read(one), await read(one)] == [("a", 0), ("b", 0)]
    assert await read(other) == ("b", 0)


async def test_a_watch_that_is_cancelled_leaves_nothing_behind(
    server: ControlServer, admin: admin_pb2_grpc.AdminServiceStub, feed: ChangeFeed
) -> None:
    call = await watching(admin)
    assert feed.watched
    call.cancel()
    await server.handlers.drained()
    assert not feed.watched


async def test_a_watch_ends_with_draining_when_the_feed_closes(
    admin: admin_pb2_grpc.AdminServiceStub, feed: ChangeFeed
) -> None:
    call = await watching(admin)
    feed.publish(info("last"))
    feed.close()
    assert await read(call) == ("last", 0)
    late = await watching(admin)
    for ended in (call, late):
        with pytest.raises(grpc.RpcError) as stopped:
            await ended.read()
        assert refusal(stopped.value).reason is Reason.DRAINING


async def test_a_slow_reader_is_told_how_many_changes_it_missed() -> None:
    feed = ChangeFeed(queue=2)
    changes = feed.subscribe()
    for i in range(5):
        feed.publish(info(f"t-{i}"))
    seen = [await anext(changes) for _ in range(2)]
    assert [(i.ref.transfer_id, skipped) for i, skipped in seen] == [("t-3", 3), ("t-4", 0)]
    feed.publish(info("t-5"))
    feed.close()
    assert [(i.ref.transfer_id, skipped) async for i, skipped in changes] == [("t-5", 0)]


async def test_changes_of_other_transfers_neither_wake_nor_count() -> None:
    feed = ChangeFeed(queue=1)
    changes = feed.subscribe("mine")
    waiting = asyncio.ensure_future(anext(changes))
    for _ in range(3):
        feed.publish(info("other"))
    feed.publish(info("mine"))
    change, skipped = await waiting
    assert (change.ref.transfer_id, skipped) == ("mine", 0)


async def test_a_reader_that_closes_ends_and_is_forgotten() -> None:
    feed = ChangeFeed()
    changes = feed.subscribe()
    waiting = asyncio.ensure_future(anext(changes, None))
    changes.close()
    assert await waiting is None
    assert not feed.watched


async def test_a_trace_is_that_of_the_instance_and_with_peers_that_of_all(
    admin: admin_pb2_grpc.AdminServiceStub,
) -> None:
    async def ask(wanted: str, peers: bool = False) -> list[str]:
        request = admin_pb2.GetTraceRequest(id=wanted, peers=peers)
        return [span.name for span in (await admin.GetTrace(request, timeout=60)).spans]

    assert await ask("t-1") == ["a"]
    # By the beginning; peers are asked by the trace's own id.
    assert await ask("r-1", peers=True) == ["b", "a"]
    assert await ask("t-2", peers=True) == ["b"]
    for wanted, peers, reason in (
        ("t-2", False, Reason.UNKNOWN_TRANSFER),
        ("nobody", True, Reason.UNKNOWN_TRANSFER),
        ("", True, Reason.BAD_REQUEST),
        ("x" * 129, True, Reason.BAD_REQUEST),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(wanted, peers)
        assert refusal(raised.value).reason is reason


async def test_who_asks_for_a_trace_hears_whether_any_is_kept(
    admin: admin_pb2_grpc.AdminServiceStub, instance: Instance
) -> None:
    told = await admin.GetTrace(admin_pb2.GetTraceRequest(id="t-1"), timeout=60)
    assert told.traces_kept == 3
    for kept, words in (("3", "the last 3"), ("0", "traces_kept is 0")):
        instance.traces_kept = kept
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.GetTrace(admin_pb2.GetTraceRequest(id="nobody"), timeout=60)
        fault = refusal(raised.value)
        assert (fault.reason, fault.metadata["traces_kept"]) == (Reason.UNKNOWN_TRANSFER, kept)
        assert words in fault.message
    # Then what an instance behind it has is all there is.
    told = await admin.GetTrace(admin_pb2.GetTraceRequest(id="t-2", peers=True), timeout=60)
    assert told.traces_kept == 0 and len(told.spans) == 1
