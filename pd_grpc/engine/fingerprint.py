"""Digests by which P and D know that they hold the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_SAMPLES = 1024
# What a configuration says about the software that wrote it, or how it is run, not the model.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "use_cache", "quantization_config"}
)


def model_fingerprint(model: Any) -> str:
    """A digest of the architecture, and of the name, dtype, shape and a sample of each weight.

    The sample is up to 1,024 evenly spaced elements, so it is quick for any size of model; weights
    that were trained apart differ in it. The same in every process on every machine.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_THE_MODEL}
    _update(digest, {"class": type(model).__name__, "config": config})
    for name, weight in sorted(model.state_dict().items()):
        _update(digest, {"name": name, "dtype": str(weight.dtype), "shape": list(weight.shape)})
        flat = weight.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        digest.update(flat[::stride].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def positions_fingerprint(config: Any) -> str:
    """A digest of the position encoding: RoPE's parameters, and the part of a head it turns."""
    digest = hashlib.sha256()
    parameters = {
        "rope": getattr(config, "rope_parameters", None),
        "partial": getattr(config, "partial_rotary_factor", None),
        "head_dim": getattr(config, "head_dim", None),
    }
    _update(digest, parameters)
    return digest.hexdigest()[:32]


def _update(digest: Any, value: object) -> None:
    digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
