"""Killed servers that no client hears of, with a real model in fp32: two Ps, two Ds and a router as
processes. An answer goes on elsewhere as the one that a D gives that is asked for it alone, without
a P; also where a token ends inside a character at the moment of the kill."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import pytest

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.client import Answer, AsyncClient
from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import load_tokenizer
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.faults.freezing import kill_amid_answers, killed_with_work
from tests.router.test_end_to_end import until_computing, until_nothing_is_held
from tests.waiting import LIMIT_S

pytest.importorskip("transformers")

pytestmark = [pytest.mark.longest, pytest.mark.timeout(900)]

CALL_S = 280.0
"""Of a model that is computed on two cores by five processes; the tiny one takes seconds."""


@dataclass(frozen=True)
class Scene:
    """A model and how much it is asked: streams of so many tokens, and long prompts later."""

    model: str
    streams: int
    max_tokens: int
    later: int


EMOJI = Scene("emoji", 20, 300, 10)
SMOLLM2 = Scene("smollm2", 6, 48, 2)


@dataclass(frozen=True)
class Asked:
    """A request: of these every other is seeded, the rest are greedy."""

    prompt: list[int]
    n: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"r{self.n}"

    async def read(self, client: AsyncClient, answer: Answer) -> Answer:
        generation = client.generate(
            token_ids=self.prompt,
            max_tokens=self.max_tokens,
            temperature=0.6 * (self.n % 2),
            seed=self.n,
            ignore_eos=True,
            request_id=self.name,
            timeout_s=CALL_S,
        )
        async for piece in generation:
            answer.add(piece)
        return answer


@contextlib.asynccontextmanager
async def seams_of(router: str) -> AsyncIterator[dict[str, int]]:
    """By request, how many tokens there were when its second attempt brought the next."""
    seams: dict[str, int] = {}
    async with grpc.aio.insecure_channel(router) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=CALL_S)
        await changes.initial_metadata()

        async def read() -> None:
            async for change in changes:
                at = change.transfer
                if at.ref.attempt == 2 and at.state == types_pb2.TRANSFER_STATE_STREAMING:
                    seams[at.request_id] = at.generated_tokens

        reading = asyncio.create_task(read())
        try:
            yield seams
        finally:
            changes.cancel()
            await asyncio.wait({reading})


async def alone(endpoint: str, asked: Sequence[Asked]) -> list[list[int]]:
    """The tokens that a D gives by itself."""
    async with AsyncClient(endpoint) as client:
        answers = await asyncio.gather(*(each.read(client, Answer()) for each in asked))
    return [answer.token_ids for answer in answers]


@pytest.fixture(
    params=[
        pytest.param(EMOJI, id="emoji"),
        pytest.param(SMOLLM2, id="smollm2", marks=[pytest.mark.model, pytest.mark.soak]),
    ]
)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A tiny model most of whose tokens end inside a character, and the packaged one."""
    chosen: Scene = request.param
    if chosen is EMOJI:
        emoji_model = pytest.importorskip("tests.engine.emoji_model")
        return replace(chosen, model=str(emoji_model.save_emoji_model(tmp_path / "emoji")))
    request.getfixturevalue("packaged_model")
    return chosen


async def test_a_killed_decode_and_a_killed_prefill_change_no_text(scene: Scene) -> None:
    tokenizer = load_tokenizer("torch", scene.model)
    plan = ClusterPlan(
        prefill=2,
        decode=2,
        model=scene.model,
        dtype="float32",
        flags=("--num-blocks", "512", "--chunk-tokens", "16"),
    )
    texts = [f"Repeat {n} times: {'🙂é€🙃д'[n % 5]}" for n in range(scene.streams)]
    streams = [Asked(tokenizer.encode(text), n, scene.max_tokens) for n, text in enumerate(texts)]
    many = tokenizer.encode("To be 🙂 or not to be 🙃: ")
    long = [Asked((many * 20)[n:240], 100 + n, 30) for n in range(scene.later)]
    running = await asyncio.to_thread(LocalCluster(plan).__enter__)
    try:
        endpoints = {instance.name: instance.endpoint for instance in running.instances}
        meant = await alone(endpoints["decode-1"], [*streams, *long])
        answers = [Answer() for _ in meant]

        def are_cut(tokens: Mapping[str, int]) -> bool:
            """Whether some answers are well under way, and not only at the end of a character."""
            cut = [
                scene.model == SMOLLM2.model or cut_inside(tokenizer, of_it, tokens[asked.name])
                for asked, of_it in zip(streams, meant, strict=False)
                if 0 < tokens.get(asked.name, 0) < scene.max_tokens * 3 // 4
            ]
            return sum(cut) >= min(3, len(streams) // 6)

        async with (
            AsyncClient(running.router_endpoint) as client,
            seams_of(running.router_endpoint) as seams,
        ):
            reading = [
                asyncio.create_task(asked.read(client, answer))
                for asked, answer in zip(streams, answers, strict=False)
            ]
            # P passes over a D that it has not met yet, so that either may have them all.
            ds = {name: running.processes[name] for name in ("decode-0", "decode-1")}
            amid = kill_amid_answers(running.router_endpoint, ds, are_cut)
            ds.pop(await asyncio.wait_for(amid, CALL_S))
            later = [
                asked.read(client, answer)
                for asked, answer in zip(long, answers[len(streams) :], strict=True)
            ]
            half = len(later) // 2
            async with until_computing(endpoints["prefill-0"]):
                reading += map(asyncio.create_task, later[:half])
            names = [asked.name for asked in long[half:]]
            prefill = "prefill-0", running.processes["prefill-0"]
            async with killed_with_work(running.router_endpoint, *prefill, names):
                reading += map(asyncio.create_task, later[half:])
            await asyncio.wait_for(asyncio.gather(*reading), CALL_S)
        for answer, tokens in zip(answers, meant, strict=True):
            assert answer.token_ids == tokens
            assert answer.text == tokenizer.decode(tokens)
        assert len({answer.text for answer in answers}) > len(answers) / 2, "the prompt matters"
        went_on = [n for n, asked in enumerate(streams) if seams.get(asked.name, 0) > 0]
        anew = [asked for asked in long if seams.get(asked.name) == 0]
        assert went_on and anew, seams
        if scene.model != SMOLLM2.model:
            inside = [n for n in went_on if cut_inside(tokenizer, meant[n], seams[f"r{n}"])]
            assert inside, "no token ended inside a character when its D was killed"
        for survivor in ("prefill-1", *ds):
            await asyncio.wait_for(until_nothing_is_held(endpoints[survivor]), LIMIT_S)
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def cut_inside(tokenizer: Tokenizer, tokens: list[int], seam: int) -> bool:
    """Whether the first tokens by themselves end in something else than all of them have there."""
    return not tokenizer.decode(tokens).startswith(tokenizer.decode(tokens[:seam]))
