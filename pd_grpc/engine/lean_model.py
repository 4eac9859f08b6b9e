"""The forward pass of models built like Llama, written out.

transformers' own pass of such a model spends more time between the operations than in them when
there are few rows. This is the same pass without what serving has no use for: queries, keys and
values by one product, positions turned at once, no masks, caches or hooks. Which models it fits is
told by the classes of all their parts, and whether it does by a comparison at load time
(`model_guard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm

from pd_grpc.engine.packed_linear import Linear
from pd_grpc.engine.paged_attention import Attends
from pd_grpc.engine.spent_pages import give_back, trim_heap

_BUILT_LIKE_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
_PLAIN = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList)
# These are called as they are, whatever they do.
_CALLED = ("rotary_emb", "act_fn")

Act = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Norm:
    """Root mean square over the last dimension, then a weight."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class _Layer:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    before_attention: _Norm
    qkv: Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: Linear
    before_mlp: _Norm
    gate_up: Linear
    act: Act
    down: Linear


class LeanModel:
    """Embedding, layers, norm and the product with the vocabulary."""

    def __init__(self, model: Any) -> None:
        """Of a transformers model that `fits`; its weights are shared until `settle`."""
        inner = model.model
        self._embed: torch.Tensor = inner.embed_tokens.weight
        self._rotary = inner.rotary_emb
        self._modules = list(inner.layers)
        self._layers = [_layer_of(module) for module in inner.layers]
        self._norm = _Norm.of(inner.norm)
        self.head = _linear_of(model.lm_head)
        # An embedding has to be there as it is, and weights are in memory once.
        self._tied = model.lm_head.weight.data_ptr() == self._embed.data_ptr()

    def linears(self) -> Iterator[Linear]:
        """Those that every row of a pass goes through."""
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def settle(self) -> None:
        """Join and pack the weights, layer by layer; the model that they came from has none of them
        afterwards."""
        for layer, module in zip(self._layers, self._modules, strict=True):
            for each in (layer.qkv, layer.out, layer.gate_up, layer.down):
                each.pack()
            kept = {layer.qkv.weight_ptr, layer.out.weight_ptr, layer.gate_up.weight_ptr}
            kept.add(layer.down.weight_ptr)
            for part in module.modules():
                if isinstance(part, torch.nn.Linear):
                    if part.weight.data_ptr() not in kept:
                        give_back(part.weight)
                    part.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            trim_heap()
        self._modules = []
        if not self._tied:
            self.head.pack()

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: Attends, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits `(wanted, vocab)` of the rows `wanted`; ids and positions are `(rows,)`."""
        hidden = embedding(token_ids, self._embed)
        cos, sin = self._turn(hidden, positions)
        for number, layer in enumerate(self._layers):
            attended = self._attend(number, layer, layer.before_attention(hidden), cos, sin, step)
            hidden = hidden + layer.out(attended)
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.act(gate) * up)
        return self.head(self._norm(hidden[wanted]))

    def _turn(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `(rows, 1, head_dim)`; the first half of the sines is negated, for what
        they are multiplied with has its halves exchanged."""
        cos, sin = (of[0].unsqueeze(1) for of in self._rotary(hidden[None], positions[None]))
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)

    def _attend(
        self,
        number: int,
        layer: _Layer,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Attends,
    ) -> torch.Tensor:
        heads, dim = layer.heads, layer.head_dim
        qkv = layer.qkv(rows).view(len(rows), -1, dim)
        turned = qkv[:, : heads + layer.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(qkv[:, :heads]), layer.key_norm(turned[:, heads:])
            turned = torch.cat((query, key), dim=1)
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((second, first), dim=-1) * sin
        query, key = turned[:, :heads], turned[:, heads:]
        value = qkv[:, heads + layer.kv_heads :]
        found = step.attend(
            number, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), layer.scale
        )
        return found.reshape(len(rows), -1)


def fits(model: Any) -> bool:
    """Whether `LeanModel` knows what `model` is and each of its parts: a quantised layer, one with
    an adapter or a hook has weights too, and computes something else with them. The comparison at
    load time would not always tell, for it has to allow for roundings."""
    name = next((n for n in _BUILT_LIKE_LLAMA if type(model).__name__ == f"{n}ForCausalLM"), None)
    home = type(model).__module__
    if name is None or not home.startswith("transformers.models."):
        return False
    known = {(home, f"{name}{part}") for part in _PARTS}
    return all(
        _runs_its_class(module)
        and (type(module) in _PLAIN or (type(module).__module__, type(module).__name__) in known)
        for path, module in model.named_modules()
        if not set(_CALLED) & set(path.split("."))
    )


def _runs_its_class(module: torch.nn.Module) -> bool:
    """Whether calling it runs the code of its class and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def _layer_of(module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    dim = attention.head_dim
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        heads=attention.q_proj.out_features // dim,
        kv_heads=attention.k_proj.out_features // dim,
        head_dim=dim,
        scale=attention.scaling,
        before_attention=_Norm.of(module.input_layernorm),
        qkv=_linear_of(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=None if query_norm is None else _Norm.of(query_norm),
        key_norm=None if key_norm is None else _Norm.of(key_norm),
        out=_linear_of(attention.o_proj),
        before_mlp=_Norm.of(module.post_attention_layernorm),
        gate_up=_linear_of(mlp.gate_proj, mlp.up_proj),
        act=mlp.act_fn,
        down=_linear_of(mlp.down_proj),
    )


def _linear_of(*modules: torch.nn.Linear) -> Linear:
    return Linear([module.weight for module in modules], [module.bias for module in modules])
