"""AdminService: what an operator sees of an instance, and may do to it.

Every server answers it alike; what differs between P, D and router is the view it is given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import seconds
from pd_grpc.protocol.refs import TransferKey, key_of, name_errors, transfer_id_errors
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
MAX_RELEASE_REASON_CHARS = 256
"""It reaches a status message, and gRPC bounds those."""
WATCH_QUEUE = 1024
"""Changes kept for one slow reader of WatchTransfers."""

TRACES_KEPT = "traces_kept"
"""The setting that says how many traces an instance keeps, and that of a trace not found."""

Context = grpc.aio.ServicerContext[Any, Any]


class AdminView(Protocol):
    """What a server shows of itself. Called on its loop; nothing here may block."""

    def server_info(self) -> admin_pb2.ServerInfo:
        """This instance."""
        ...

    async def peer_infos(self) -> list[admin_pb2.ServerInfo]:
        """The instances behind a router; nothing elsewhere."""
        ...

    def transfers(self) -> list[admin_pb2.TransferInfo]:
        """Transfers in flight, oldest first."""
        ...

    def transfer(self, transfer_id: str, attempt: int) -> admin_pb2.TransferInfo | None:
        """One transfer, ended ones while they are remembered; attempt 0 is the newest."""
        ...

    def spans(self, wanted: str) -> list[admin_pb2.Span]:
        """What is still known of a trace, by its id or that of a request or transfer."""
        ...

    async def peer_spans(self, trace_id: str) -> list[admin_pb2.Span]:
        """The same of the instances behind a router; nothing elsewhere."""
        ...

    def release(self, transfer_id: str, attempt: int, reason: str) -> admin_pb2.TransferInfo | None:
        """End a transfer by hand; None when it is not known. One that has ended stays as it is."""
        ...

    def drain(self, deadline_s: float | None) -> int:
        """Start draining and return the transfers in flight; None is the configured time."""
        ...


class ChangeFeed:
    """Hands every change of a transfer to those who watch. To be used on one loop."""

    def __init__(self, queue: int = WATCH_QUEUE) -> None:
        self._queue = queue
        self._readers: set[Changes] = set()
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anyone listens; when not, there is no need to describe a change."""
        return bool(self._readers)

    def publish(self, info: admin_pb2.TransferInfo) -> None:
        """Tell every reader. `info` must not be changed afterwards. Never waits."""
        for reader in self._readers:
            reader.add(info)

    def subscribe(self, transfer_id: str = "") -> Changes:
        """Every change from this call on, of one transfer or of all; to be closed."""
        reader = Changes(self, transfer_id, self._queue)
        if self._closed:
            reader.finish()
        else:
            self._readers.add(reader)
        return reader

    def close(self) -> None:
        """End every reader, once it has read what is queued. Later ones end at once."""
        self._closed = True
        for reader in self._readers:
            reader.finish()
        self._readers.clear()

    def forget(self, reader: Changes) -> None:
        """A reader left."""
        self._readers.discard(reader)


class Changes(AsyncIterator[tuple[admin_pb2.TransferInfo, int]]):
    """One reader's changes, each with the number left out before it.

    The queue is bounded: the oldest change makes room, for the newest state is what counts.
    """

    def __init__(self, feed: ChangeFeed, transfer_id: str, queue: int) -> None:
        self._feed = feed
        self._transfer_id = transfer_id
        self._waiting: deque[admin_pb2.TransferInfo] = deque(maxlen=queue)
        self._skipped = 0
        self._finished = False
        self._wake = asyncio.Event()

    def add(self, info: admin_pb2.TransferInfo) -> None:
        """Queue a change if it is one this reader asked for."""
        if self._transfer_id not in ("", info.ref.transfer_id):
            return
        self._skipped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(info)
        self._wake.set()

    def finish(self) -> None:
        """No more will come."""
        self._finished = True
        self._wake.set()

    def close(self) -> None:
        """The reader wants no more."""
        self._feed.forget(self)
        self.finish()

    async def __anext__(self) -> tuple[admin_pb2.TransferInfo, int]:
        while not self._waiting:
            if self._finished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        skipped, self._skipped = self._skipped, 0
        return self._waiting.popleft(), skipped


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The wire side of an `AdminView`."""

    def __init__(self, view: AdminView, changes: ChangeFeed) -> None:
        self._view = view
        self._changes = changes

    async def GetServerInfo(
        self, request: admin_pb2.GetServerInfoRequest, context: Context
    ) -> admin_pb2.GetServerInfoResponse:
        peers = await self._view.peer_infos() if request.peers else []
        return admin_pb2.GetServerInfoResponse(server=self._view.server_info(), peers=peers)

    async def ListTransfers(
        self, request: admin_pb2.ListTransfersRequest, context: Context
    ) -> admin_pb2.ListTransfersResponse:
        errors = _state_errors(request.states) + _page_errors(request)
        if errors:
            await rpc.abort(context, bad_request(errors))
        transfers = self._view.transfers()
        if request.page_token:
            rest = self._after(request.page_token, transfers)
            if rest is None:
                gone = "names a transfer that is no longer remembered; begin again without it"
                await rpc.abort(context, bad_request([FieldError("page_token", gone)]))
            transfers = rest
        if request.states:
            wanted = frozenset(request.states)
            transfers = [info for info in transfers if info.state in wanted]
        size = request.page_size or DEFAULT_PAGE_SIZE
        page = transfers[:size]
        token = str(key_of(page[-1].ref)) if len(transfers) > size else ""
        return admin_pb2.ListTransfersResponse(transfers=page, next_page_token=token)

    async def GetTransfer(
        self, request: admin_pb2.GetTransferRequest, context: Context
    ) -> admin_pb2.GetTransferResponse:
        if errors := transfer_id_errors(request.transfer_id, "transfer_id"):
            await rpc.abort(context, bad_request(errors))
        info = self._view.transfer(request.transfer_id, request.attempt)
        if info is None:
            await rpc.abort(context, _unknown(request.transfer_id, request.attempt))
        return admin_pb2.GetTransferResponse(transfer=info)

    async def WatchTransfers(
        self, request: admin_pb2.WatchTransfersRequest, context: Context
    ) -> None:
        if request.transfer_id and (
            errors := transfer_id_errors(request.transfer_id, "transfer_id")
        ):
            await rpc.abort(context, bad_request(errors))
        changes = self._changes.subscribe(request.transfer_id)
        try:
            # Tells the caller that it misses nothing from here on.
            await context.send_initial_metadata(())
            async for info, skipped in changes:
                await rpc.write(
                    context, admin_pb2.WatchTransfersResponse(transfer=info, skipped=skipped)
                )
        finally:
            changes.close()
        await rpc.abort(context, Fault(Reason.DRAINING, "the server is stopping"))

    async def ReleaseTransfer(
        self, request: admin_pb2.ReleaseTransferRequest, context: Context
    ) -> admin_pb2.ReleaseTransferResponse:
        errors = transfer_id_errors(request.transfer_id, "transfer_id")
        if len(request.reason) > MAX_RELEASE_REASON_CHARS:
            limit = f"must have at most {MAX_RELEASE_REASON_CHARS} characters"
            errors.append(FieldError("reason", limit))
        if errors:
            await rpc.abort(context, bad_request(errors))
        info = self._view.release(request.transfer_id, request.attempt, request.reason)
        if info is None:
            await rpc.abort(context, _unknown(request.transfer_id, request.attempt))
        return admin_pb2.ReleaseTransferResponse(transfer=info)

    async def GetTrace(
        self, request: admin_pb2.GetTraceRequest, context: Context
    ) -> admin_pb2.GetTraceResponse:
        if errors := name_errors(request.id, "id", required=True):
            await rpc.abort(context, bad_request(errors))
        spans = self._view.spans(request.id)
        kept = int(self._view.server_info().settings.get(TRACES_KEPT, "0"))
        if request.peers:
            trace_id = spans[0].trace_id if spans else request.id
            spans += await self._view.peer_spans(trace_id)
        if not spans:
            await rpc.abort(context, _unknown_trace(request.id, kept))
        spans.sort(key=lambda span: span.start.ToNanoseconds())
        return admin_pb2.GetTraceResponse(spans=spans, traces_kept=kept)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        deadline_s = seconds(request.deadline) if request.HasField("deadline") else None
        if deadline_s is not None and deadline_s < 0:
            await rpc.abort(context, bad_request([FieldError("deadline", "must not be negative")]))
        return admin_pb2.DrainResponse(transfers=self._view.drain(deadline_s))

    def _after(
        self, token: str, transfers: list[admin_pb2.TransferInfo]
    ) -> list[admin_pb2.TransferInfo] | None:
        """Those behind the last transfer of the page before; None when nobody remembers it.

        That one may have ended since. Its age still says where it stood.
        """
        last = _parse_page_token(token)
        for i, info in enumerate(transfers):
            if key_of(info.ref) == last:
                return transfers[i + 1 :]
        ended = None if last is None else self._view.transfer(*last)
        if ended is None:
            return None
        return [info for info in transfers if seconds(info.age) < seconds(ended.age)]


def _state_errors(states: Any) -> list[FieldError]:
    known = frozenset(types_pb2.TransferState.values()) - {types_pb2.TRANSFER_STATE_UNSPECIFIED}
    return [
        FieldError(f"states[{i}]", f"{state} is no state of a transfer")
        for i, state in enumerate(states)
        if state not in known
    ]


def _page_errors(request: admin_pb2.ListTransfersRequest) -> list[FieldError]:
    errors = []
    if request.page_size > MAX_PAGE_SIZE:
        limit = f"must be at most {MAX_PAGE_SIZE}; 0 means {DEFAULT_PAGE_SIZE}"
        errors.append(FieldError("page_size", limit))
    if request.page_token and _parse_page_token(request.page_token) is None:
        errors.append(FieldError("page_token", "must come from the previous answer"))
    return errors


def _parse_page_token(token: str) -> TransferKey | None:
    transfer_id, _, attempt = token.rpartition("#")
    if transfer_id_errors(transfer_id, "") or not (attempt.isascii() and attempt.isdecimal()):
        return None
    return TransferKey(transfer_id, int(attempt))


def _unknown(transfer_id: str, attempt: int) -> Fault:
    which = f"attempt {attempt} of {transfer_id}" if attempt else transfer_id
    return Fault(Reason.UNKNOWN_TRANSFER, f"no transfer {which} is known here")


def _unknown_trace(wanted: str, kept: int) -> Fault:
    text = f"no trace of {wanted} is among the last {kept}; it runs still, or was not sampled"
    if not kept:
        text = f"no trace is kept here, of {wanted} or any other: {TRACES_KEPT} is 0"
    return Fault(Reason.UNKNOWN_TRANSFER, text, {TRACES_KEPT: str(kept)})
