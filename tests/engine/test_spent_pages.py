"""The pages of weights that were copied are given back, and no other's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from pd_grpc.engine.spent_pages import give_back

ROWS = 1 << 20


def mapped_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1])
    raise AssertionError


def test_what_is_given_back_is_no_longer_resident_and_its_neighbours_are_whole(
    tmp_path: Path,
) -> None:
    weights = {name: torch.full((ROWS, 4), float(i)) for i, name in enumerate("abc", 1)}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    before = mapped_kib()

    give_back(loaded["b"])

    assert before - mapped_kib() > 15 * 1024
    assert torch.equal(loaded["a"], weights["a"]) and torch.equal(loaded["c"], weights["c"])


def test_neighbours_in_plain_memory_are_whole() -> None:
    whole = torch.ones(3, 5000)

    give_back(whole[1])

    assert bool((whole[0] == 1).all()) and bool((whole[2] == 1).all())


def test_nothing_of_a_weight_within_a_page_is_given_back() -> None:
    few = torch.ones(10)
    give_back(few)
    assert bool((few == 1).all())
