"""The written-out forward pass: what transformers computes, from weights that are there once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GPTNeoXConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from pd_grpc.engine import lean_model, packed_linear
from pd_grpc.engine.forward_pass import ModelPass, Passing
from pd_grpc.engine.lean_model import LeanModel, fits
from pd_grpc.engine.packed_linear import Linear
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.sampling import Sampling
from tests.engine.torch_models import (
    CONFIGS,
    SIZES,
    Request,
    decode,
    eager_tokens,
    load_tiny,
    prefill,
    save_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(max_tokens=6, temperature=0.0)


def load_plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    ).eval()


def logits(forward: Any, engine: TorchEngine) -> torch.Tensor:
    """Of a prompt of 13 tokens beside a single later one."""
    kv = PagedKv(engine.layout, 8, torch.float32)
    runs = [Run(0, 13, [3, 1]), Run(5, 1, [6])]
    ids = torch.arange(14) * 17 % 256
    step = Step(kv, runs, lambda layer: None)
    with torch.inference_mode():
        found: torch.Tensor = forward(ids, step.positions, step, torch.tensor([0, 12, 13]))
    return found


@pytest.mark.parametrize("name", list(CONFIGS))
def test_it_computes_what_the_models_own_code_does(folders: dict[str, Path], name: str) -> None:
    engine = load_tiny(folders[name])

    assert isinstance(engine._passing.forward, LeanModel)
    theirs = logits(ModelPass(load_plain(folders[name])), engine)
    torch.testing.assert_close(
        logits(engine._passing.forward, engine), theirs, rtol=1e-4, atol=1e-4
    )


def test_a_pass_that_disagrees_gives_way_to_the_models_own(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LeanModel._turn
    monkeypatch.setattr(
        LeanModel, "_turn", lambda self, hidden, positions: right(self, hidden, positions + 1)[::-1]
    )
    engine = load_tiny(folders["llama"])
    request = Request(list(range(20)), [9, 4, 7, 1], GREEDY)

    prefill(engine, [request])
    decode(engine, [request])

    assert isinstance(engine._passing.forward, ModelPass)
    assert request.tokens == eager_tokens(folders["llama"], request.prompt, GREEDY.max_tokens)


def test_a_model_that_is_built_otherwise_keeps_its_own_code(tmp_path: Path) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    engine = load_tiny(save_model(tmp_path, GPTNeoXConfig(**sizes)))

    assert isinstance(engine._passing.forward, ModelPass)


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_it() -> None:
    class LlamaForCausalLM:
        pass

    assert not fits(LlamaForCausalLM())


class LowRank(torch.nn.Linear):
    """A linear layer with an adapter, small enough to pass for a rounding."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + 1e-5 * rows.sum(-1, keepdim=True)


class Doubled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def with_adapter(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.__class__ = LowRank


def with_other_mlp(model: Any) -> None:
    model.model.layers[2].mlp.__class__ = Doubled


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *seen: None)


def with_hook_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda *seen: None)


def with_own_forward(model: Any) -> None:
    model.model.embed_tokens.forward = lambda ids: model.model.embed_tokens.weight[ids]


@pytest.mark.parametrize(
    "change", [with_adapter, with_other_mlp, with_hook, with_hook_before, with_own_forward]
)
def test_a_model_with_a_part_of_another_kind_keeps_its_own_code(
    folders: dict[str, Path], change: Callable[[Any], None]
) -> None:
    model = load_plain(folders["llama"])
    assert fits(model)
    change(model)

    assert not fits(model)
    assert isinstance(Passing.quickest(model, lambda forward: True).forward, ModelPass)


@pytest.mark.parametrize("name", ["llama", "llama-tied-yarn"])
def test_weights_are_there_once(folders: dict[str, Path], name: str) -> None:
    model = load_plain(folders[name])
    old = [
        weakref.ref(module.weight)
        for module in model.model.layers.modules()
        if isinstance(module, torch.nn.Linear)
    ]

    with torch.inference_mode():
        passing = Passing.quickest(model, lambda forward: True)
    gc.collect()

    assert not [weight for ref in old if (weight := ref()) is not None]
    assert isinstance(passing.forward, LeanModel)
    tied = name == "llama-tied-yarn"
    assert (passing.forward.head.weight_ptr == model.model.embed_tokens.weight.data_ptr()) == tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outs", [[24], [16, 8, 8]])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, outs: list[int], bias: bool) -> None:
    weights = [torch.randn(out, 48).to(dtype) for out in outs]
    biases = [torch.randn(out).to(dtype) if bias else None for out in outs]
    rows = torch.randn(7, 48).to(dtype)
    expected = torch.cat([linear(rows.double(), w.double()) for w in weights], dim=-1) + (
        torch.cat([b for b in biases if b is not None]).double() if bias else 0
    )

    product = Linear(weights, biases)
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (0.02, 0.2)
    torch.testing.assert_close(product(rows).double(), expected, rtol=rtol, atol=atol)
    with torch.inference_mode():
        product.pack()
        torch.testing.assert_close(product(rows).double(), expected, rtol=rtol, atol=atol)
    assert (product.in_features, product.out_features) == (48, sum(outs))


def test_a_packing_that_computes_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_TOLERANCE", {torch.float32: -1.0})
    weight = torch.randn(16, 48)
    rows = torch.randn(3, 48)
    product = Linear([weight], [None])

    with torch.inference_mode():
        product.pack()

        assert product.weight_ptr == weight.data_ptr()
        assert torch.equal(product(rows), linear(rows, weight))


def test_weights_are_packed_with_those_of_one_layer_there_twice_at_most(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by what is alive, not by what is resident."""
    model = load_plain(folders["llama"])
    joined = [
        [
            weakref.ref(part.weight)
            for part in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
            )
        ]
        for layer in model.model.layers
    ]
    lean = LeanModel(model)
    left: list[int] = []

    def layers_alive() -> None:
        left.append(sum(any(ref() is not None for ref in layer) for layer in joined))

    # What runs when a layer is done.
    monkeypatch.setattr(lean_model, "trim_heap", layers_alive)
    with torch.inference_mode():
        lean.settle()

    layers = SIZES["num_hidden_layers"]
    assert left == [layers - 1 - done for done in range(layers)]
