"""Servers that are stopped before they are killed, so that it is known what dies with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping

import grpc.aio

from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.waiting import LIMIT_S


@contextlib.asynccontextmanager
async def killed_with_work(
    router: str, name: str, pid: int, requests: Collection[str]
) -> AsyncIterator[None]:
    """Stop the P of this name. Kill it behind the block, once the router has given it one of these
    requests, which the block asks for."""
    os.kill(pid, signal.SIGSTOP)
    yield
    async with grpc.aio.insecure_channel(router) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        async def given() -> None:
            while True:
                listed = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
                for each in listed.transfers:
                    if each.request_id in requests and each.peer.startswith(f"{name} > "):
                        return

        await asyncio.wait_for(given(), LIMIT_S)
    os.kill(pid, signal.SIGKILL)


async def kill_amid_answers(
    router: str, pids: Mapping[str, int], fits: Callable[[Mapping[str, int]], bool]
) -> str:
    """Kill one of these Ds when the answers that it is giving fit: by request, how many tokens the
    router has. They are looked at again when D has been stopped; where they do not fit any more it
    goes on. Returns its name."""
    async with grpc.aio.insecure_channel(router) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        async def that_fits() -> set[str]:
            listed = await admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60)
            of_each: dict[str, dict[str, int]] = {name: {} for name in pids}
            for each in listed.transfers:
                _, _, name = each.peer.rpartition(" > ")
                of_each.get(name, {})[each.request_id] = each.generated_tokens
            return {name for name, tokens in of_each.items() if fits(tokens)}

        while True:
            for name in await that_fits():
                os.kill(pids[name], signal.SIGSTOP)
                if name in await that_fits():
                    os.kill(pids[name], signal.SIGKILL)
                    return name
                os.kill(pids[name], signal.SIGCONT)
