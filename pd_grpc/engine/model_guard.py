"""Refusing models that the paged attention would run wrongly."""

from __future__ import annotations

from typing import Any

import torch

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step, UnsupportedAttention
from pd_grpc.protocol.layout import KvLayout

# Those whose turned keys do not depend on how long the sequence is, or becomes.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

_PROBE_TOKENS = 24
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


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


def check_attention(name: str, model: Any, layout: KvLayout) -> None:
    """Run a short text through the paged attention in two chunks and a single token, and through
    the model's own attention in one piece. ModelError unless both agree.

    This finds what no configuration field tells: a model that attends by code of its own, or puts
    positions where the paged attention does not see them.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (_PROBE_TOKENS,), generator=generator)
    try:
        ours = _paged_logits(model, layout, tokens)
    except UnsupportedAttention as error:
        raise ModelError("model", f"{name} is not supported: {error}") from error
    model.set_attn_implementation("eager")
    theirs = model(input_ids=tokens[None], use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    gap = float((ours - theirs).float().norm() / theirs.float().norm())
    allowed = _PROBE_TOLERANCE[ours.dtype]
    if not gap <= allowed:
        raise ModelError(
            "model",
            f"{name} is not supported: with paged attention its logits are {gap:.2g} away from its "
            f"own, at most {allowed} is allowed",
        )


def _paged_logits(model: Any, layout: KvLayout, tokens: torch.Tensor) -> torch.Tensor:
    blocks = layout.blocks_for(_PROBE_TOKENS)
    kv = PagedKv(layout, blocks, model.dtype)
    # Neither zeros nor anything finite, so that a read of what was not written shows.
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
        if step.layers_seen != list(range(layout.groups[0].layers)):
            raise UnsupportedAttention(
                f"its attention ran for layers {step.layers_seen} of {layout.groups[0].layers}"
            )
        logits.append(out.logits[0])
    return torch.cat(logits)
