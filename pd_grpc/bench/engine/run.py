"""The benchmark of the torch engine: what it makes of a model, beside plain `transformers`.

Both sides run in one process, with the same threads and the same weights, and take turns; a ratio
is made within a round, so that what slows the machine down for a while slows both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from pd_grpc.bench.endurance.report import made_on
from pd_grpc.bench.engine.cases import NEW_TOKENS, Case, Timed, cases_of
from pd_grpc.bench.engine.figures import (
    COMPARES,
    READING,
    TARGETS,
    Pair,
    figures_of,
    same_tokens,
)
from pd_grpc.bench.engine.ours import blocks_of, run_ours
from pd_grpc.bench.statistics import METHOD
from pd_grpc.engine.base import Engine
from pd_grpc.engine.load import load_engine
from pd_grpc.engine.model_error import ModelError
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.servers.onednn import CAPACITIES

if TYPE_CHECKING:
    from pd_grpc.engine.plain_generate import PlainGenerate

Tell = Callable[[str], None]
Report = dict[str, Any]
Dtype = Literal["bfloat16", "float32", "float16"]

_PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class EngineScope:
    """How much is run, of what."""

    quick: bool = False
    rounds: int = 7
    new_tokens: int = NEW_TOKENS
    model: str = "smollm2"
    dtype: Dtype = "bfloat16"
    threads: int = 0
    """Of torch, on both sides; 0 leaves its own default."""

    @classmethod
    def of(cls, quick: bool) -> EngineScope:
        """All of it, some five minutes of SmolLM2 on two cores, or the same figures within one."""
        return cls(True, 3, 8) if quick else cls()


async def bench_engine(scope: EngineScope, tell: Tell) -> Report:
    """The figures, as one JSON object. ModelError when the model cannot be loaded."""
    began, before = time.monotonic(), os.getloadavg()
    cases = cases_of(scope.new_tokens)
    config = _config(scope, cases)
    engine = load_engine(config, tell)
    tell("loading the same for generate")
    # Here, for torch takes seconds to import, and the engine has it by now.
    from pd_grpc.engine.plain_generate import PlainGenerate

    plain = PlainGenerate(scope.model, scope.dtype)
    if plain.fingerprint != engine.layout.model:
        raise ModelError("model", f"{scope.model} was not loaded alike on both sides")
    rounds: dict[Case, list[Pair]] = {case: [] for case in cases}
    try:
        engine.warm_up()
        for number in range(-1, scope.rounds):
            for case in cases:
                if number < 0:
                    tell(f"warming up, {case.name}")
                    _pair(engine, plain, replace(case, new_tokens=min(2, case.new_tokens)), config)
                    continue
                tell(f"round {number + 1} of {scope.rounds}, {case.name}")
                rounds[case].append(_pair(engine, plain, case, config, number % 2 == 1))
        figures = figures_of(rounds)
    finally:
        engine.close()
    about = made_on()
    about["versions"] |= {name: metadata.version(name) for name in _PACKAGES}
    about["load_average"] = {"before": before, "after": os.getloadavg()}
    about["machine"]["cpu_capability"] = plain.cpu_capability
    wrong = sum(
        len(case.lengths) - same_tokens(pair) for case, pairs in rounds.items() for pair in pairs
    )
    return {
        "benchmark": "engine",
        "compares": COMPARES,
        "reading": READING,
        **figures,
        "wrong_answers": wrong if scope.dtype == "float32" else 0,
        "targets": {target.figure: str(target) for target in TARGETS},
        "targets_met": {t.figure: t.met(figures[t.figure]) for t in TARGETS},
        "model": engine.name,
        "dtype": scope.dtype,
        "threads": plain.threads,
        "settings": {
            "chunk_tokens": config.chunk_tokens,
            "prefill_batch": config.prefill_batch,
            "block_size": config.block_size,
            **{name: os.environ.get(name, "") for name in CAPACITIES},
        },
        "scope": asdict(scope),
        "intervals": METHOD,
        "took_s": time.monotonic() - began,
        **about,
    }


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """What makes a run worthless; a target that is missed does not."""
    wrong = report["wrong_answers"]
    return [f"{wrong} answers are not those of generate"] if wrong else []


def _config(scope: EngineScope, cases: tuple[Case, ...]) -> EngineConfig:
    sizes = EngineConfig(model=scope.model, dtype=scope.dtype, threads=scope.threads)
    most = max(blocks_of(case, sizes.block_size) for case in cases)
    longest = max(max(case.lengths) + case.new_tokens for case in cases)
    return sizes.model_copy(update={"num_blocks": 2 * most, "max_model_len": longest})


def _pair(
    engine: Engine,
    plain: PlainGenerate,
    case: Case,
    config: EngineConfig,
    plain_first: bool = False,
) -> Pair:
    """Both sides of a case, one after the other."""
    first = _run_plain(plain, case, engine.vocab_size) if plain_first else None
    ours = run_ours(engine, case, config)
    return Pair(ours, first or _run_plain(plain, case, engine.vocab_size))


def _run_plain(plain: PlainGenerate, case: Case, vocab_size: int) -> Timed:
    tokens, times_s = plain.run(case.prompts(vocab_size), case.new_tokens)
    return Timed(times_s[0], times_s[-1] - times_s[0], tokens)
