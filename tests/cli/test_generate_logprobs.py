"""`pd-grpc generate --logprobs`, of real servers on a tiny random model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.client import AsyncClient, Options
from tests.cli.running import pd_grpc
from tests.cluster import Cluster, cluster
from tests.engine.torch_models import CONFIGS, another_pool, load_tiny, save_model

TINY: dict[str, Any] = {"engine": "torch", "dtype": "float32", "block_size": 8, "threads": 1}
SHORT = ("--raw", "--max-tokens", "4", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    return save_model(tmp_path_factory.mktemp("tiny"), CONFIGS["llama"]())


async def generate(running: Cluster, *flags: str) -> str:
    where = ("--endpoint", running.router.endpoint)
    done = await asyncio.to_thread(pd_grpc, "generate", "some words", *SHORT, *flags, *where)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(line: str) -> list[float]:
    """What stands in a line of the table."""
    return [float(cell) for cell in line.split()]


async def test_each_token_has_a_line_and_an_object_with_what_the_client_is_told(
    folder: Path,
) -> None:
    async with cluster(load=another_pool(load_tiny(folder, threads=1)), **TINY) as running:
        async with AsyncClient(running.router.endpoint) as client:
            asked: Options = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, "logprobs": 2}
            told = await client.generate("some words", **asked).collect()
        shown = await generate(running, "--top-logprobs", "2")
        plain = await generate(running, "--logprobs")
        answer = json.loads(await generate(running, "--top-logprobs", "2", "--json"))
        unasked = json.loads(await generate(running, "--json"))
    meant = [
        [(each.token_id, each.logprob) for each in (position.chosen, *position.top)]
        for position in told.logprobs
    ]
    assert [len(row) for row in meant] == [3] * 4
    assert [row[0] for row in meant] == [row[1] for row in meant], "greedy is the likeliest"
    of_program = [
        [(each["token_id"], each["logprob"]) for each in (position, *position["top"])]
        for position in answer["logprobs"]
    ]
    assert of_program == meant
    assert unasked["logprobs"] == []
    head, *lines = shown.removeprefix(f"{told.text}\n").splitlines()
    assert head.split() == ["token", "logprob", "likeliest"]
    flat = [[value for pair in row for value in pair] for row in meant]
    assert [cells(line) for line in lines] == [pytest.approx(row, abs=1e-4) for row in flat]
    # Without others beside it.
    head, *lines = plain.removeprefix(f"{told.text}\n").splitlines()
    assert head.split() == ["token", "logprob"]
    rows = [cells(line) for line in lines]
    assert rows == [pytest.approx(row[:2], abs=1e-4) for row in flat]


async def test_of_several_answers_each_line_begins_with_the_number_of_its_own(folder: Path) -> None:
    flags = ("--temperature", "1", "--seed", "3", "-n", "2", "--logprobs")
    async with cluster(load=another_pool(load_tiny(folder, threads=1)), **TINY) as running:
        shown = await generate(running, *flags)
        answer = json.loads(await generate(running, *flags, "--json"))
    head, *table = shown.splitlines()[-9:]
    assert head.startswith("    ") and head.split() == ["token", "logprob"]
    numbers = [line.split()[0] for line in table]
    assert numbers == ["[0]"] * 4 + ["[1]"] * 4
    token_ids = [int(line.split()[1]) for line in table]
    assert token_ids == [each for choice in answer["choices"] for each in choice["token_ids"]]
    for choice in answer["choices"]:
        assert [each["token_id"] for each in choice["logprobs"]] == choice["token_ids"]
        assert all(each["top"] == [] for each in choice["logprobs"])
