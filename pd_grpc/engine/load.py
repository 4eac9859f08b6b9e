"""From a configuration to an engine or a tokenizer. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from pd_grpc.engine.base import Engine, Tokenizer
from pd_grpc.engine.hub import reach
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import find_model, find_tokenizer
from pd_grpc.engine.pool_size import check_sizes, describe_pool, pool_blocks
from pd_grpc.protocol.config import EngineConfig

__all__ = ["ModelError", "load_engine", "load_tokenizer"]


def load_engine(
    config: EngineConfig, progress: Callable[[str], None] = lambda stage: None
) -> Engine:
    """Load the engine that `config` describes; `progress` hears of each stage in a few words.

    ModelError names the field of `config` that is wrong.
    """
    check_sizes(config)
    if config.engine == "sim":
        from pd_grpc.engine.sim import SimEngine
        from pd_grpc.engine.sim_layouts import sim_layout

        try:
            # Several ranks have a copy of the whole beside their own memory.
            copies = 1 if config.tp * config.pp == 1 else 2
            block_bytes = copies * sim_layout(config).block_bytes
            blocks = pool_blocks(config, block_bytes)
            config = config.model_copy(update={"num_blocks": blocks, "pool_gib": 0.0})
            engine = SimEngine(config)
        except ValueError as error:
            field, _, text = str(error).partition(": ")
            raise ModelError(field, text) from error
        pool = describe_pool(blocks, block_bytes, config.block_size, engine.max_model_len)
        progress(f"making {pool}")
        return engine
    if config.tp > 1 or config.pp > 1:
        field = "tp" if config.tp > 1 else "pp"
        text = f"{getattr(config, field)} is not built; only sim has more than one rank"
        raise ModelError(field, text)
    if config.device != "cpu":
        # Only torch knows what there is.
        from pd_grpc.engine.device import find_device

        find_device(config.device)
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
