"""The torch engine on a device that lags behind the host, and on a GPU of which there is only the
name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from pd_grpc.engine import forward_pass, paged_attention
from pd_grpc.engine import torch as torch_engine
from pd_grpc.engine.base import EngineFault, PrefillChunk
from pd_grpc.engine.device import HostStreams, Streams
from pd_grpc.engine.forward_pass import Passing
from pd_grpc.engine.paged_attention import ATTENTION_NAME, Run
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.sampling import Sampling
from tests.engine.deferred_device import WAITS, DeferredStreams
from tests.engine.fake_gpu import GPU, fake_gpu, on_gpu
from tests.engine.torch_models import (
    CONFIGS,
    NO_LAYER,
    VOCAB,
    Request,
    beside,
    decode,
    load_tiny,
    prefill,
    save_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(max_tokens=8, temperature=0.0)
PROMPT = random.Random(1).choices(range(VOCAB), k=45)
P_TABLE, D_TABLE = [3, 4, 60, 2, 50, 11], [7, 9, 1, 2, 40, 41, 42]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load_tiny(save_model(tmp_path_factory.mktemp("models"), CONFIGS["llama"]()))


@pytest.fixture(scope="module")
def answer(host: TorchEngine) -> list[int]:
    """What one engine says by itself."""
    request = Request(PROMPT, D_TABLE, GREEDY)
    prefill(host, [request])
    decode(host, [request])
    return request.tokens


def on(streams: Streams, host: TorchEngine) -> TorchEngine:
    """An engine over the same weights with a pool of its own, reached by `streams`."""
    return beside(host, 64, shares_pool=True, streams=streams)


def handed_over(p: TorchEngine, d: TorchEngine) -> list[int]:
    """Each layer is read on P as soon as P tells of it, and written on D at once."""
    there = Request(PROMPT, D_TABLE, GREEDY)
    told = []

    def send(group: int, layer: int) -> None:
        told.append(layer)
        pieces = p.memory.read(P_TABLE, group, layer, 1)
        d.memory.write(D_TABLE[: len(P_TABLE)], group, layer, 1, memoryview(b"".join(pieces)))

    for chunk in Request(PROMPT, P_TABLE, GREEDY).chunks(32):
        told.clear()
        (sampled,) = p.prefill([chunk], send)
        assert told == [0, 1, 2]
    assert sampled is not None
    there.output.append(sampled)
    decode(d, [there])
    return there.tokens


@pytest.mark.parametrize(
    "make",
    [
        HostStreams,
        DeferredStreams,
        # Layers are told of while the pass is still asked for, some of them.
        lambda: DeferredStreams(pace=100),
    ],
    ids=["host", "behind", "a little behind"],
)
def test_what_is_handed_over_through_staging_is_answered_alike(
    make: Callable[[], Streams], host: TorchEngine, answer: list[int]
) -> None:
    p, d = on(make(), host), on(make(), host)
    p.warm_up()
    assert handed_over(p, d) == answer


@pytest.mark.parametrize("ignored", WAITS)
def test_each_wait_of_the_engine_is_needed(
    ignored: str, host: TorchEngine, answer: list[int]
) -> None:
    """A layer's event before it is read, a copy's before it is looked at, and D's writes before
    they are decoded from."""
    try:
        found = handed_over(*(on(DeferredStreams(ignored=ignored), host) for _ in range(2)))
    except EngineFault:  # the logits are no numbers yet
        return
    assert found != answer


class Leaving(Exception):
    """Raised by a caller of the engine."""


def test_a_step_that_ends_early_leaves_nothing_to_be_stored(host: TorchEngine) -> None:
    """Its blocks are another's as soon as it has ended."""
    engine = on(DeferredStreams(), host)

    def leave(group: int, layer: int) -> None:
        raise Leaving

    with pytest.raises(Leaving):
        engine.prefill([PrefillChunk(PROMPT[:24], 0, [5, 6, 7])], leave)
    kv = random.Random(2).randbytes(3 * host.layout.block_bytes)
    engine.memory.write([5, 6, 7], 0, 0, 3, memoryview(kv))
    assert b"".join(engine.memory.read([5, 6, 7], 0, 0, 3)) == kv
    engine.prefill([PrefillChunk(PROMPT[:8], 0, [8])], NO_LAYER)
    assert b"".join(engine.memory.read([5, 6, 7], 0, 0, 3)) == kv


def test_a_pool_that_is_not_the_hosts_is_lent_to_nobody(host: TorchEngine) -> None:
    engine = on(DeferredStreams(), host)
    assert engine.memory.shared_fd is None
    assert engine.memory.host_address is None
    engine.close()


def fake_engine(name: str, monkeypatch: pytest.MonkeyPatch, own: bool = False) -> TorchEngine:
    """To be made and used within `fake_gpu`; with the `own` pass of the model, or with ours."""
    config: Any = CONFIGS[name]()
    model = on_gpu(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    planes = tuple(Plane(kind, "float32", 2, dim) for kind in (PlaneKind.K, PlaneKind.V))
    layout = KvLayout("model", "positions", 8, (KvGroup(GroupKind.FULL, 3, planes),))
    # It compares numbers, of which there are none.
    monkeypatch.setattr(forward_pass, "steady_group", lambda linears: 4)
    monkeypatch.setattr(torch_engine, "constraint_of", lambda *vocabulary: None)
    tokenizer: Any = type("NoTokenizer", (), {"eos_token_ids": frozenset()})()
    passing = Passing.quickest(model, lambda lean: own is False)
    streams = HostStreams()
    return TorchEngine(name, model, passing, tokenizer, layout, 16, 512, streams=streams)


def pass_on(engine: TorchEngine) -> torch.Tensor:
    """A pass over a chunk from the beginning, one after others, and a single token."""
    runs = [Run(0, 5, [1]), Run(9, 9, [3, 4, 5]), Run(8, 1, [6, 7])]
    return engine._forward(runs, [1] * 15, [4, 13, 14], lambda layer: None)


@pytest.mark.parametrize("own", [True, False], ids=["the model's", "ours"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_stays_on_the_gpu_and_its_logits_come_back(
    name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gpu():
        engine = fake_engine(name, monkeypatch, own)
        logits = pass_on(engine)
        assert logits.shape == (3, VOCAB)
        assert logits.device.type == "cpu"
        assert engine._kv.blocks.device == GPU


def test_slabs_are_gathered_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is the host's, and so is real: it takes no fake tensor. That is as far as a
    read gets here."""
    with fake_gpu():
        memory = fake_engine("llama", monkeypatch).memory
        with pytest.raises(RuntimeError, match="numpy"):
            memory.read([1, 2], 0, 0, 2)


@pytest.mark.parametrize("misplaced", ["mask", "positions and tables"])
def test_a_tensor_left_on_the_host_is_found(
    misplaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if misplaced == "mask":
        mask = paged_attention._causal_mask
        monkeypatch.setattr(
            paged_attention,
            "_causal_mask",
            lambda rows, length, like: mask(rows, length, torch.empty(0, dtype=like.dtype)),
        )
    else:
        monkeypatch.setattr(paged_attention, "placed", lambda device, *tensors: tensors)
    with fake_gpu():
        engine = fake_engine("llama", monkeypatch)
        with pytest.raises(EngineFault, match="same device"):
            pass_on(engine)
