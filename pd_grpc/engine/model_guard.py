"""Refusing models that the paged attention would run wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step, UnsupportedAttention
from pd_grpc.protocol.layout import KvLayout

# Those whose turned keys do not depend on how long the sequence is, or becomes.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

_Result = TypeVar("_Result")

_PROBE_TOKENS = 24
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class KvShape:
    """What one token's keys, or values, of a model look like."""

    layers: int
    heads: int
    head_dim: int


def refuse_unsupported(name: str, config: Any) -> None:
    """ModelError when the configuration asks for what is not built, before any weight is read."""
    for reason in _reasons(config):
        raise ModelError("model", f"{name} ({config.model_type}) is not supported: {reason}")


def _reasons(config: Any) -> list[str]:
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is not decoder-only")
    if getattr(config, "sub_configs", None):
        reasons.append("it is a model of several parts, not a language model alone")
    if getattr(config, "max_position_embeddings", None) is None:
        reasons.append("it does not say how long a sequence may be (max_position_embeddings)")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        reasons.append(f"it has layers of kind {', '.join(other)}; only full_attention is built")
    elif getattr(config, "sliding_window", None) is not None:
        reasons.append(f"it has a sliding window of {config.sliding_window} tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _FIXED_ROPE:
        reasons.append(f"its rope_type {kind} depends on the length of the sequence")
    return reasons


def kv_shape(name: str, model: Any) -> KvShape:
    """The layers, KV heads and head size of `model`, seen on a pass over one token; the
    configuration names them differently from model to model, and not always truly.

    ModelError when the layers differ, or do not use the paged attention."""
    seen = _Shapes()
    _run(name, lambda: model(input_ids=torch.tensor([[0]]), use_cache=False, pd_step=seen))
    if not seen.layers:
        raise _unsupported(name, "it does not use transformers' attention interface")
    if list(seen.layers) != list(range(len(seen.layers))) or len(set(seen.layers.values())) > 1:
        raise _unsupported(name, f"its attention layers differ in number or shape: {seen.layers}")
    heads, head_dim = seen.layers[0]
    return KvShape(len(seen.layers), heads, head_dim)


def check_attention(name: str, model: Any, layout: KvLayout) -> None:
    """Run a short text through the paged attention in two chunks and a single token, and through
    the model's own attention in one piece. ModelError unless both agree.

    This finds what no configuration field tells: a model that attends by code of its own, or puts
    positions where the paged attention does not see them.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (_PROBE_TOKENS,), generator=generator)
    ours = _run(name, lambda: _paged_logits(model, layout, tokens))
    model.set_attn_implementation("eager")
    theirs = _run(name, lambda: model(input_ids=tokens[None], use_cache=False).logits[0])
    model.set_attn_implementation(ATTENTION_NAME)
    gap = float((ours - theirs).float().norm() / theirs.float().norm())
    allowed = _PROBE_TOLERANCE[ours.dtype]
    if not gap <= allowed:
        reason = f"with paged attention its logits are {gap:.2g} away from its own, over {allowed}"
        raise _unsupported(name, reason)


def _paged_logits(model: Any, layout: KvLayout, tokens: torch.Tensor) -> torch.Tensor:
    blocks = layout.blocks_for(_PROBE_TOKENS)
    kv = PagedKv(layout, blocks, model.dtype)
    # No number at all, so that a read of what was not written shows.
    kv.blocks.fill_(float("nan"))
    table = list(reversed(range(blocks)))
    logits = []
    first, second = _PROBE_TOKENS // 2 + 1, _PROBE_TOKENS - 1
    for start, end in ((0, first), (first, second), (second, _PROBE_TOKENS)):
        step = Step(kv, [Run(start, end - start, table)], lambda layer: None)
        out = model(
            input_ids=tokens[None, start:end],
            position_ids=step.positions[None],
            use_cache=False,
            pd_step=step,
        )
        logits.append(out.logits[0])
    return torch.cat(logits)


class _Shapes:
    """Notes the shape of each layer's keys, `(heads, head_dim)`, and attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers[layer] = (key.shape[0], key.shape[2])
        return query.transpose(0, 1)


def _run(name: str, forward: Callable[[], _Result]) -> _Result:
    try:
        return forward()
    except UnsupportedAttention as error:
        raise _unsupported(name, str(error)) from error
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unsupported(name, f"it does not run: {error}") from error


def _unsupported(name: str, reason: str) -> ModelError:
    return ModelError("model", f"{name} is not supported: {reason}")
