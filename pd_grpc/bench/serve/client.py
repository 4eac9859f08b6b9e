"""The client as a process of its own: it asks routers and notes when what came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pd_grpc.bench.serve.load import Request
from pd_grpc.bench.serve.timing import Heard, Message
from pd_grpc.client import AsyncClient, Fault, TransportFault
from pd_grpc.protocol.faults import Reason

_CANDIDATES = 20


class ServeClient:
    """The project's own asynchronous client, one for each router."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._clients = {name: AsyncClient(end) for name, end in spec["routers"].items()}

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def do(self, command: Mapping[str, Any]) -> Any:
        client = self._clients[command["router"]]
        if command["do"] == "model":
            return (await client.model_info()).max_model_len
        if command["do"] == "rank":
            return await _rank(client, command["prompt"], command["answer"])
        requests = [Request(**each) for each in command["requests"]]
        if command["do"] == "open":
            heard = await _open(client, requests, command["within_s"])
        elif command["do"] == "closed":
            heard = await _closed(client, requests, command["at_once"], command["within_s"])
        else:
            raise ValueError(f"do: {command['do']!r} is nothing that the client does")
        return [asdict(each) for each in heard]

    async def stop(self) -> None:
        for client in self._clients.values():
            await client.close()


async def _open(client: AsyncClient, requests: Sequence[Request], timeout_s: float) -> list[Heard]:
    """Each at its time, whatever has become of the others."""
    begun = time.monotonic()
    asked = []
    for request in requests:
        await asyncio.sleep(max(0.0, begun + request.at_s - time.monotonic()))
        asked.append(asyncio.create_task(_ask(client, request, begun, timeout_s)))
    return list(await asyncio.gather(*asked))


async def _closed(
    client: AsyncClient, requests: Sequence[Request], at_once: int, timeout_s: float
) -> list[Heard]:
    """`at_once` under way, the next when one has ended."""
    begun = time.monotonic()
    waiting = iter(requests)

    async def lane(waiting: Iterator[Request]) -> list[Heard]:
        return [await _ask(client, request, begun, timeout_s) for request in waiting]

    lanes = await asyncio.gather(*(lane(waiting) for _ in range(at_once)))
    return [heard for each in lanes for heard in each]


async def _ask(client: AsyncClient, request: Request, begun: float, timeout_s: float) -> Heard:
    sent_s = time.monotonic() - begun
    messages: list[Message] = []
    token_ids: list[int] = []
    stages: Mapping[str, float] = {}
    fault = ""
    asked = client.generate(
        token_ids=request.token_ids,
        timeout_s=timeout_s,
        max_tokens=request.output,
        temperature=0.0,
        ignore_eos=True,
    )
    try:
        async for chunk in asked:
            if chunk.token_ids:
                messages.append(Message(time.monotonic() - begun, len(chunk.token_ids)))
                token_ids += chunk.token_ids
            if chunk.end is not None:
                stages = chunk.end.timings_ms
    except (Fault, TransportFault) as error:
        fault = str(error)
    if not fault and len(token_ids) != request.output:
        fault = f"{len(token_ids)} tokens instead of {request.output}"
    return Heard(request.name, sent_s, messages, token_ids, fault, dict(stages))


async def _rank(
    client: AsyncClient, prompt: Sequence[int], answer: Sequence[int]
) -> Mapping[str, float]:
    """The likeliest next tokens of an answer so far, with their log-probabilities; none where the
    model does not tell them."""
    asked = client.generate(
        token_ids=prompt,
        generated_token_ids=answer,
        max_tokens=len(answer) + 1,
        temperature=0.0,
        ignore_eos=True,
        logprobs=_CANDIDATES,
    )
    try:
        (position,) = (await asked.collect()).logprobs
    except Fault as error:
        if error.reason is not Reason.FEATURE:
            raise
        return {}
    return {str(each.token_id): each.logprob for each in position.top}
