"""D90x: operators told something else than what is."""

from __future__ import annotations

import pytest

from pd_grpc.decode.view import DecodeView
from pd_grpc.protocol import admin
from pd_grpc.protocol.admin import AdminService, Changes
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.v1 import admin_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D900")
def never_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlServer, "set_ready", lambda self, ready, reason="": None)


@mutant("D901")
def free_blocks_are_left_out(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.server_info

    def server_info(self):  # type: ignore[no-untyped-def]
        info = right(self)
        kept = [b for b in info.blocks if b.state != admin_pb2.BLOCK_STATE_FREE]
        del info.blocks[:]
        info.blocks.extend(kept)
        return info

    patch.setattr(DecodeView, "server_info", server_info)


@mutant("D902", "D903")
def the_newest_comes_first(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.transfers
    patch.setattr(DecodeView, "transfers", lambda self: right(self)[::-1])


@mutant("D903")
def every_page_is_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdminService, "_after", lambda self, token, transfers: transfers)


@mutant("D904")
def every_state_is_listed(patch: pytest.MonkeyPatch) -> None:
    right = AdminService.ListTransfers

    async def list_transfers(self, request, context):  # type: ignore[no-untyped-def]
        request.ClearField("states")
        return await right(self, request, context)

    patch.setattr(AdminService, "ListTransfers", list_transfers)


@mutant("D905")
def the_peer_is_not_told(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView._describe

    def describe(self, transfer):  # type: ignore[no-untyped-def]
        info = right(self, transfer)
        info.peer = ""
        return info

    patch.setattr(DecodeView, "_describe", describe)


@mutant("D906", "D908")
def only_the_living_are_known(patch: pytest.MonkeyPatch) -> None:
    def transfer(self, transfer_id, attempt):  # type: ignore[no-untyped-def]
        live = self._runtime.machine.find(transfer_id, attempt)
        return None if live is None else self._describe(live)

    patch.setattr(DecodeView, "transfer", transfer)


@mutant("D907", "D908")
def any_attempt_will_do(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.transfer
    patch.setattr(DecodeView, "transfer", lambda self, name, attempt: right(self, name, 0))


@mutant("D909")
def everybody_watches_everything(patch: pytest.MonkeyPatch) -> None:
    right = Changes.__init__

    def init(self, feed, transfer_id, queue):  # type: ignore[no-untyped-def]
        right(self, feed, "", queue)

    patch.setattr(Changes, "__init__", init)


@mutant("D909")
def ends_are_not_told(patch: pytest.MonkeyPatch) -> None:
    right = DecodeView.changed

    def changed(self, change):  # type: ignore[no-untyped-def]
        if change.ended is None:
            right(self, change)

    patch.setattr(DecodeView, "changed", changed)


@mutant("D910")
def pages_of_any_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admin, "MAX_PAGE_SIZE", 1 << 30)


@mutant("D911")
def a_drain_in_the_past_is_one_now(patch: pytest.MonkeyPatch) -> None:
    right = AdminService.Drain

    async def drain(self, request, context):  # type: ignore[no-untyped-def]
        request.deadline.seconds = max(0, request.deadline.seconds)
        return await right(self, request, context)

    patch.setattr(AdminService, "Drain", drain)
