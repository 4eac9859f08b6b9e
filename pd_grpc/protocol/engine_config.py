"""The configuration of an inference engine, a part of `pd_grpc.protocol.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pd_grpc.protocol.config_section import Section

SimLayout = Literal["plain", "fp8-scale", "sliding", "sliding-fp8-scale"]


class EngineConfig(Section):
    """Which engine, which model, how large a pool."""

    engine: Literal["torch", "sim"] = Field("torch", description="inference engine")
    model: str = Field(
        "smollm2",
        description="Hugging Face folder, hub name or GGUF file; smollm2 is the packaged model",
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        "bfloat16", description="dtype of weights and KV"
    )
    weight_cache: str = Field(
        "auto",
        min_length=1,
        description="folder for weights converted from GGUF; auto is pd-grpc/weights in"
        " XDG_CACHE_HOME or ~/.cache, off keeps none",
    )
    weight_cache_gib: float = Field(32.0, gt=0, description="most that it may hold, GiB")
    device: str = Field(
        "cpu", description="where weights and pool are: cpu, cuda (the first GPU) or cuda:N"
    )
    threads: int = Field(
        0,
        ge=0,
        description="torch threads, as many as the server has cores for itself; 0 leaves torch's"
        " own default, which is all, and has them wait for each other without a core",
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens per block")
    num_blocks: int = Field(1024, ge=2, description="blocks in the pool, unless pool_gib is set")
    pool_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 30,
        description="GiB of memory for the pool, in place of num_blocks; 0 is unset",
    )
    max_model_len: int = Field(
        0, ge=0, description="prompt plus output, tokens; 0 is the model's own limit"
    )
    prefix_cache: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the pool that may keep KV of nobody's for prompts that begin alike;"
        " it makes room whenever blocks are needed. 0 keeps nothing",
    )
    tp: int = Field(
        1,
        ge=1,
        le=64,
        description="tensor-parallel ranks, each with its own heads and memory; sim alone has more"
        " than one",
    )
    pp: int = Field(
        1,
        ge=1,
        le=64,
        description="pipeline-parallel ranks, each with its own layers and memory; sim alone has"
        " more than one",
    )
    max_batch: int = Field(32, ge=1, description="requests decoded together")
    prefill_batch: int = Field(8, ge=1, description="requests prefilled together")
    chunk_tokens: int = Field(
        512, ge=1, description="prompt tokens per step, a multiple of block_size"
    )
    step_tokens: int = Field(
        0,
        ge=0,
        description="decode: tokens per step, one for each request that decodes and the rest of"
        " prompts; 0 is max_batch and two cuts of a prompt, of 128 tokens each",
    )
    sim_time_scale: float = Field(
        0.0, ge=0, description="sim: factor on the step table; 0 takes no time at all"
    )
    sim_vocab: int = Field(32000, ge=300, description="sim: size of the vocabulary")
    sim_layers: int = Field(4, ge=1, description="sim: layers")
    sim_heads: int = Field(2, ge=1, description="sim: heads")
    sim_head_dim: int = Field(8, ge=8, description="sim: elements per head")
    sim_layout: SimLayout = Field(
        "plain", description="sim: with a plane of scales, a sliding group beside the full one"
    )
    sim_window: int = Field(64, ge=1, description="sim: window of the sliding group in tokens")
    sim_format: Literal["canonical", "token-major"] = Field(
        "canonical", description="sim: order of the bytes that the pool holds of a layer"
    )

    @property
    def shares_pool(self) -> bool:
        """Whether the pool must lie in memory that other processes may map."""
        return False
