"""A tiny random model that speaks in characters of several bytes, a byte for each token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.torch_models import CONFIGS, save_model

CHARACTERS = "😀é€äдж"
"""Whatever bytes follow each other in these are a character, so that the last byte is enough to
know what may come next."""
PREFERENCE = 2.5
"""How much it likes the next byte of a character, and after the last one the first of another."""
KV_SHARE = 0.3
"""Of what attention and MLP add to a token's own embedding. All tokens before decide by it which
character follows, and now and then that none does."""


def save_emoji_model(folder: Path) -> Path:
    """Save it with its tokenizer, as a Hugging Face folder."""
    save_model(folder, CONFIGS["llama"](), seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spelled = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in CHARACTERS]
    firsts = {tokens[0] for tokens in spelled}
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        embeddings.mul_(8)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(KV_SHARE)

        def prefer(after: int, token: int) -> None:
            direction = embeddings[after] / embeddings[after].norm()
            head[token] += PREFERENCE * direction

        for tokens in spelled:
            for after, token in pairwise(tokens):
                prefer(after, token)
            for first in firsts:
                prefer(tokens[-1], first)
    model.save_pretrained(folder)
    return folder
