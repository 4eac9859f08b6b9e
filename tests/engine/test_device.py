"""Which device is meant, and what is said when it is not there."""

from __future__ import annotations

import pytest
import torch

from pd_grpc.engine.device import CPU, HostStreams, find_device, free_bytes, placed, streams_of
from pd_grpc.engine.model_error import ModelError


@pytest.mark.parametrize(
    "name", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "CUDA", "mps", "cuda:²"]
)
def test_what_is_no_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match="cpu, cuda or cuda:N") as refused:
        find_device(name)
    assert refused.value.field == "device"


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ModelError, match=r"device: cuda:1: torch .* is built without CUDA"):
        find_device("cuda:1")


@pytest.mark.parametrize(
    ("count", "name", "says"),
    [
        (0, "cuda", "cuda: torch sees no CUDA device"),
        (2, "cuda:2", "cuda:2: torch sees 2 CUDA devices"),
    ],
)
def test_a_device_beyond_those_that_are_there_is_refused(
    count: int, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ModelError, match=f"device: {says}"):
        find_device(name)


def test_one_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda") == torch.device("cuda:0")
    assert find_device("cuda:1") == torch.device("cuda:1")
    assert find_device("cpu") == CPU


def test_a_device_is_asked_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 7, 8

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert free_bytes(torch.device("cuda:1")) == 7
    assert asked == [torch.device("cuda:1")]
    assert free_bytes(CPU) > 1 << 20


def test_the_host_has_nothing_to_wait_for() -> None:
    tensors = torch.arange(3), torch.arange(4).view(2, 2)
    assert all(a is b for a, b in zip(placed(CPU, *tensors), tensors, strict=True))
    streams = streams_of(CPU)
    assert isinstance(streams, HostStreams)
    event = streams.another().record()
    streams.compute.wait(event)
    event.wait()
    assert event.done()
