"""`pd-grpc up`: a whole system on this machine."""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Mapping
from types import FrameType

import typer
from rich.table import Table

from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster
from pd_grpc.cli.console import progress, say_error, stdout

EXIT_FAILED = 1

_KNOBS = "Engine"


class EngineName(str, enum.Enum):
    """Which engine."""

    TORCH = "torch"
    SIM = "sim"


class DtypeName(str, enum.Enum):
    """Which dtype of weights and KV."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


_ENGINE: EngineName = typer.Option(EngineName.TORCH, help="Inference engine.")
_DTYPE: DtypeName = typer.Option(DtypeName.BFLOAT16, help="dtype of weights and KV.")


class _Stop(Exception):
    """A signal asked to stop."""


def up(
    prefill: int = typer.Option(1, min=1, help="Prefill servers."),
    decode: int = typer.Option(1, min=1, help="Decode servers."),
    model: str = typer.Option("smollm2", help="Hugging Face folder, hub name or GGUF file."),
    engine: EngineName = _ENGINE,
    dtype: DtypeName = _DTYPE,
    aggregated: bool = typer.Option(
        False, "--aggregated", help="Decode servers alone, which prefill themselves."
    ),
    port: int = typer.Option(50050, min=0, max=65535, help="The router's port; 0 takes any."),
    host: str = typer.Option("127.0.0.1", help="Address that every server binds."),
    num_blocks: int | None = typer.Option(None, rich_help_panel=_KNOBS, help="Blocks per pool."),
    block_size: int | None = typer.Option(None, rich_help_panel=_KNOBS, help="Tokens per block."),
    max_model_len: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Prompt plus output, tokens."
    ),
    max_batch: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Requests decoded together."
    ),
    chunk_tokens: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Prompt tokens per prefill step."
    ),
    threads: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="torch threads per server; default shares the cores."
    ),
    sim_time_scale: float | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="sim: factor on the step times."
    ),
    otlp: str | None = typer.Option(None, help="host:port of an OTLP collector."),
    log_level: str | None = typer.Option(None, help="Least severe line in the logs."),
) -> None:
    """Start a router, prefill and decode servers on this machine; Ctrl-C stops them.

    Every other setting of the servers can be given as a PD_* variable.
    """
    knobs = {
        "--num-blocks": num_blocks,
        "--block-size": block_size,
        "--max-model-len": max_model_len,
        "--max-batch": max_batch,
        "--chunk-tokens": chunk_tokens,
        "--threads": threads,
        "--sim-time-scale": sim_time_scale,
    }
    common = _flags({"--otlp": otlp, "--log-level": log_level})
    plan = ClusterPlan(
        prefill=prefill,
        decode=decode,
        engine=engine.value,
        model=model,
        dtype=dtype.value,
        aggregated=aggregated,
        host=host,
        port=port,
        flags=(*common, *_flags(knobs)),
        router_flags=tuple(common),
    )
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    try:
        with contextlib.ExitStack() as stack:
            with progress("starting") as tell:
                cluster = stack.enter_context(LocalCluster(plan, tell))
            stdout.print(_table(cluster))
            stdout.print(f"Ask {cluster.router_endpoint}; Ctrl-C stops everything.")
            cluster.watch()
    except ClusterError as error:
        say_error(str(error))
        raise typer.Exit(EXIT_FAILED) from error
    except (KeyboardInterrupt, _Stop):
        return


def _flags(values: Mapping[str, object]) -> list[str]:
    return [word for flag, v in values.items() if v is not None for word in (flag, str(v))]


def _table(cluster: LocalCluster) -> Table:
    table = Table("role", "name", "endpoint", "pid")
    for instance in cluster.instances:
        table.add_row(instance.role, instance.name, instance.endpoint, str(instance.pid))
    return table


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stop
