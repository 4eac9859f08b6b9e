"""`pd-grpc up`: a whole system on this machine."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from collections.abc import Mapping
from types import FrameType

import typer
from rich.table import Table

from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster
from pd_grpc.cli.console import progress, refuse, say_error, stdout
from pd_grpc.cli.settings import CONFIG_ENV, SettingsError, env_of, flag_of, load_settings
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, ServerConfig
from pd_grpc.protocol.endpoints import MAX_PORT, split_address

DEFAULT_PORT = 50050

_KNOBS = "Engine"
_UP_ITSELF = {
    "prefill": "tells the router of the prefill servers it starts (--prefill is their number)",
    "decode": "tells the router of the decode servers it starts (--decode is their number)",
    "name": "names its servers itself",
    "advertise": "tells its servers of each other itself",
    "bulk_advertise": "tells its servers of each other itself",
}
"""Settings of one server among several, and what `up` does about them itself."""

_OF_SEVERAL = {"bulk_port": "has several decode servers take free ones"}
"""The same of settings that one decode server alone may well have."""


class EngineName(str, enum.Enum):
    """Which engine."""

    TORCH = "torch"
    SIM = "sim"


class DtypeName(str, enum.Enum):
    """Which dtype of weights and KV."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


_ENGINE: EngineName | None = typer.Option(None, help="Inference engine.", show_default="torch")
_DTYPE: DtypeName | None = typer.Option(
    None, help="dtype of weights and KV.", show_default="bfloat16"
)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGINT too: in the background of a script it is ignored unless it is asked for."""


class _Stop(Exception):
    """A signal asked to stop."""


class _Signals:
    """What signals do. The first one stops everything in order; another one does not break that
    off, but has the servers end with no wait for what they still serve."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self._stopping = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise _Stop
        for instance in self.cluster.instances if self.cluster else ():
            instance.process.kill()


def up(
    prefill: int | None = typer.Option(None, min=0, help="Prefill servers.", show_default="1"),
    decode: int = typer.Option(1, min=1, help="Decode servers."),
    model: str | None = typer.Option(
        None, help="Hugging Face folder, hub name or GGUF file.", show_default="smollm2"
    ),
    engine: EngineName | None = _ENGINE,
    dtype: DtypeName | None = _DTYPE,
    aggregated: bool | None = typer.Option(
        None, "--aggregated", help="Decode servers alone, which prefill themselves."
    ),
    port: int | None = typer.Option(
        None, help="The router's port; 0 takes any.", show_default=str(DEFAULT_PORT)
    ),
    host: str | None = typer.Option(
        None, help="Address that every server binds.", show_default="127.0.0.1"
    ),
    config: str | None = typer.Option(
        None, help="TOML file for every server; its keys are the names of settings."
    ),
    device: str | None = typer.Option(
        None,
        rich_help_panel=_KNOBS,
        help="Where weights and pools are: cpu, cuda (the first GPU) or cuda:N.",
        show_default="cpu",
    ),
    num_blocks: int | None = typer.Option(None, rich_help_panel=_KNOBS, help="Blocks per pool."),
    pool_gib: float | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="GiB per pool, in place of its blocks."
    ),
    block_size: int | None = typer.Option(None, rich_help_panel=_KNOBS, help="Tokens per block."),
    max_model_len: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Prompt plus output, tokens."
    ),
    max_batch: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Requests decoded together."
    ),
    chunk_tokens: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Prompt tokens per step."
    ),
    step_tokens: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="Tokens per step of decode servers."
    ),
    threads: int | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="torch threads per server; default shares the cores."
    ),
    sim_time_scale: float | None = typer.Option(
        None, rich_help_panel=_KNOBS, help="sim: factor on the step times."
    ),
    otlp: str | None = typer.Option(None, help="host:port of an OTLP collector."),
    prometheus: str | None = typer.Option(
        None,
        help="host:port of the router's metrics; prefill and then decode servers have the ports "
        "behind it. Port 0 takes free ones.",
    ),
    traces_kept: int | None = typer.Option(
        None, min=0, help="Last traces that each server keeps.", show_default="256"
    ),
    log_level: str | None = typer.Option(None, help="Least severe line in the logs."),
    log_format: str | None = typer.Option(None, help="human or json.", show_default="human"),
) -> None:
    """Start a router, prefill and decode servers on this machine; Ctrl-C stops them.

    Every setting of the servers, these among them, can be given as a PD_* variable or in a TOML
    file; a flag goes first.
    """
    signals = _Signals()
    for signum in _STOPPING:
        signal.signal(signum, signals)
    try:
        plan = plan_of(
            prefill,
            decode,
            common={
                "engine": engine and engine.value,
                "model": model,
                "host": host,
                "otlp": otlp,
                "traces_kept": traces_kept,
                "log_level": log_level,
                "log_format": log_format,
                "config": config,
            },
            engines={
                "dtype": dtype and dtype.value,
                "device": device,
                "num_blocks": num_blocks,
                "pool_gib": pool_gib,
                "block_size": block_size,
                "max_model_len": max_model_len,
                "max_batch": max_batch,
                "chunk_tokens": chunk_tokens,
                "step_tokens": step_tokens,
                "threads": threads,
                "sim_time_scale": sim_time_scale,
            },
            router={"port": port, "aggregated": aggregated or None},
            environ=os.environ,
            prometheus=prometheus,
        )
        with contextlib.ExitStack() as stack:
            with progress("starting") as tell:
                cluster = signals.cluster = LocalCluster(plan, tell)
                stack.enter_context(cluster)
            stdout.print(_table(cluster))
            stdout.print(f"Logs: {cluster.folder}, until it stops", soft_wrap=True)
            stdout.print(f"Ask {cluster.router_endpoint}; Ctrl-C stops everything.")
            cluster.watch()
    except SettingsError as error:
        refuse(str(error))
    except ClusterError as error:
        say_error(str(error))
        raise typer.Exit(error.status) from error
    except (KeyboardInterrupt, _Stop):
        for signum in _STOPPING:
            # Python gives handlers of its own back before it has ended.
            signal.signal(signum, signal.SIG_IGN)


def plan_of(
    prefill: int | None,
    decode: int,
    common: Mapping[str, object],
    engines: Mapping[str, object],
    router: Mapping[str, object],
    environ: Mapping[str, str],
    prometheus: str | None = None,
) -> ClusterPlan:
    """What to start: flags before variables before the TOML file before what `up` takes itself.

    The mappings hold the flags that were given, by the names of their settings; None is one that
    was not. Everything is checked as the servers themselves will. SettingsError.
    """
    for_all, for_engines, for_router = _flags(common), _flags(engines), _flags(router)
    metrics = _flags({"prometheus": prometheus})
    routing = load_settings(RouterConfig, [*for_all, *for_router, *metrics], environ)
    serving = load_settings(DecodeConfig, [*for_all, *for_engines], environ)
    load_settings(PrefillConfig, [*for_all, *for_engines], environ)
    file = str(common["config"] or environ.get(CONFIG_ENV, ""))
    one_alone = {**_UP_ITSELF, **(_OF_SEVERAL if decode > 1 else {})}
    _refuse_everyones_own((routing, serving), one_alone, environ, file)
    if routing.aggregated and prefill:
        raise SettingsError(f"--prefill {prefill} and --aggregated exclude each other")
    if not routing.aggregated and prefill == 0:
        raise SettingsError("--prefill 0 needs --aggregated")
    _check_ports(routing.prometheus, decode + (0 if routing.aggregated else prefill or 1))
    given = serving.model_fields_set
    if "threads" in given:
        # In the place of the share of the cores.
        for_engines = [*for_engines, "--threads", str(serving.threads)]
    return ClusterPlan(
        prefill=1 if prefill is None else prefill,
        decode=decode,
        engine=serving.engine,
        model=serving.model,
        dtype=serving.dtype,
        aggregated=routing.aggregated,
        host=serving.host,
        port=routing.port if "port" in routing.model_fields_set else DEFAULT_PORT,
        flags=(*for_all, *for_engines),
        router_flags=tuple(for_all),
        prometheus=routing.prometheus,
        drain_s=serving.drain_s if "drain_s" in given else ClusterPlan.drain_s,
    )


def _flags(values: Mapping[str, object]) -> list[str]:
    words = []
    for name, value in values.items():
        if value is not None:
            words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return words


def _refuse_everyones_own(
    configs: tuple[ServerConfig, ...],
    one_alone: Mapping[str, str],
    environ: Mapping[str, str],
    file: str,
) -> None:
    given = {name for config in configs for name in config.model_fields_set}
    for name, does in one_alone.items():
        if name in given:
            source = env_of(name) if env_of(name) in environ else f"{name} in {file}"
            raise SettingsError(f"{source} is for one server; `pd-grpc up` {does}")


def _check_ports(prometheus: str, behind: int) -> None:
    if prometheus and split_address(prometheus)[1] + behind > MAX_PORT:
        text = (
            f"prometheus needs {behind} more ports behind {prometheus}, and {MAX_PORT} is the last"
        )
        raise SettingsError(text)


def _table(cluster: LocalCluster) -> Table:
    metrics = any(instance.metrics for instance in cluster.instances)
    table = Table("role", "name", "endpoint", "pid", *(["metrics"] if metrics else []))
    for instance in cluster.instances:
        cells = [instance.role, instance.name, instance.endpoint, str(instance.pid)]
        table.add_row(*cells, *([instance.metrics] if metrics else []))
    return table
