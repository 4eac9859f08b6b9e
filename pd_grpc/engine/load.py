"""From a configuration to an engine or a tokenizer. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from pd_grpc.engine.base import Engine, Tokenizer
from pd_grpc.engine.hub import reach
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import find_model, find_tokenizer
from pd_grpc.engine.pool_size import check_pool
from pd_grpc.protocol.config import EngineConfig

__all__ = ["ModelError", "load_engine", "load_tokenizer"]


def load_engine(
    config: EngineConfig, progress: Callable[[str], None] = lambda stage: None
) -> Engine:
    """Load the engine that `config` describes; `progress` hears of each stage in a few words.

    ModelError names the field of `config` that is wrong.
    """
    _check_sizes(config)
    if config.engine == "sim":
        from pd_grpc.engine.sim import SimEngine, sim_layout

        try:
            check_pool(config.num_blocks, sim_layout(config).block_bytes)
            return SimEngine(config)
        except ValueError as error:
            field, _, text = str(error).partition(": ")
            raise ModelError(field, text) from error
    if config.device != "cpu":
        raise ModelError("device", f"{config.device} is not built; only cpu is")
    source = find_model(config.model)
    progress(f"reading {source.name}" if source.local else f"looking up {source.name} on the hub")
    source = reach(source)
    # Importing torch takes seconds; a model that is not there is told of before.
    from pd_grpc.engine.torch import load_torch_engine

    return load_torch_engine(config, source, progress)


def load_tokenizer(engine: str, model: str, vocab_size: int = 32000) -> Tokenizer:
    """The tokenizer of a model, without its weights.

    `engine` is `torch` or `sim`; `vocab_size` is for sim alone. ModelError when there is none.
    """
    if engine == "sim":
        from pd_grpc.engine.sim_tokenizer import SimTokenizer

        return SimTokenizer(vocab_size)
    from pd_grpc.engine.hf_tokenizer import read_tokenizer

    return read_tokenizer(reach(find_tokenizer(model)))


def _check_sizes(config: EngineConfig) -> None:
    if config.chunk_tokens % config.block_size:
        raise ModelError(
            "chunk_tokens",
            f"{config.chunk_tokens} is not a multiple of block_size ({config.block_size})",
        )
    room = config.num_blocks * config.block_size
    if config.max_model_len > room:
        raise ModelError(
            "num_blocks",
            f"{config.num_blocks} blocks of {config.block_size} hold {room} tokens, fewer than "
            f"max_model_len ({config.max_model_len})",
        )
