"""`transformers` as its users call it: what the torch engine is measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from pd_grpc.engine.fingerprint import model_fingerprint
from pd_grpc.engine.model_source import find_model
from pd_grpc.engine.weights import load_weights, read_config, reading


class Generated(NamedTuple):
    """The new tokens of each prompt, and when each step had its own, in seconds from the call."""

    tokens: list[list[int]]
    times_s: list[float]


class PlainGenerate:
    """A model with the attention that transformers takes by itself, and its `generate`."""

    def __init__(self, model: str, dtype: str) -> None:
        """Weights of its own, in `dtype`. ModelError when they cannot be loaded."""
        source = find_model(model)
        with reading(source):
            self._model: Any = load_weights(
                source, read_config(source), getattr(torch, dtype), "sdpa"
            )
        self._model.generation_config.eos_token_id = None
        self.fingerprint = model_fingerprint(self._model)

    @property
    def threads(self) -> int:
        """Those that torch computes with in this process."""
        return torch.get_num_threads()

    @property
    def cpu_capability(self) -> str:
        """The widest instructions of this machine that torch has routines for."""
        return torch.backends.cpu.get_cpu_capability()

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Greedily, with a cache, shorter prompts padded on the left; no end of sequence ends it.
        Ids and mask are there before the clock starts, as a tokenizer would have made them."""
        longest = max(map(len, prompts))
        gaps = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * gap + list(p) for gap, p in zip(gaps, prompts, strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        clock = _Clock()
        began = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            streamer=clock,
        )
        _, *times = clock.times
        return Generated(out[:, longest:].tolist(), [at - began for at in times])


class _Clock(BaseStreamer):
    """When each token was there: `generate` puts the prompt first, then a token of every row after
    each of its steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
