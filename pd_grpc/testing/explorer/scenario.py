"""Which processes there are, what their clients want, and what may go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair
from pd_grpc.testing.explorer.client_process import Wish
from pd_grpc.testing.explorer.kv import BLOCK

FAULTS = (
    "lose",
    "repeat",
    "stall",
    "corrupt",
    "freeze",
    "crash",
    "drain",
    "leave",
    "fail",
    "hang",
)
"""What may go wrong: a call is lost with what is on its way, a request comes twice, a call is
delayed as long as one likes, a chunk of KV changes on its way, a process is stopped, killed or told
to drain, a client leaves, an engine's step raises or lasts as long as one likes."""

TIMES: dict[str, Any] = {
    "request_budget_s": 20.0,
    "backoff_jitter": 0.0,
    "tombstone_s": 60.0,
    "session_idle_s": 300.0,
}


FIRST_EPOCH = 100
"""Of every process that is there from the beginning."""


@dataclass(frozen=True)
class Scenario:
    """`requests` are, for each client, the numbers of its P and of its Ds in order of preference;
    None leaves them to the router's policy."""

    prefills: int = 2
    decodes: int = 2
    requests: tuple[tuple[int, tuple[int, ...]] | None, ...] = (None, None)
    prompts: tuple[int, ...] = (3, 3)
    """Tokens of each client's prompt."""
    max_tokens: int = 2
    prefill_blocks: int = 6
    decode_blocks: int = 3
    chunk_tokens: int = 4
    budget_s: float = 20.0
    faults: tuple[str, ...] = FAULTS
    fine: bool = True
    """Whether the bulk sides are loops of their own, with their own place in every order."""

    direct: bool = False
    """Whether clients make their two calls themselves, and let each end on its own."""

    recovery: bool = False
    """Whether routers watch the instances, and try a request elsewhere."""

    prefix_cache: float = 0.0
    """Of every P and D. Above 0 all prompts begin alike, and KV may be another transfer's."""

    polling: bool = False
    """Whether the processes are those of `polling` instead of ours."""

    @property
    def names(self) -> list[str]:
        """Every process, Ps first, then Ds, then clients."""
        return [
            *(f"p{i + 1}" for i in range(self.prefills)),
            *(f"d{i + 1}" for i in range(self.decodes)),
            *(f"c{i + 1}" for i in range(len(self.requests))),
        ]

    @property
    def targets(self) -> list[Target]:
        """Every P and D as a router knows it at first."""
        names = self.names[: self.first_client]
        return [Target(name, f"{name}:1", FIRST_EPOCH) for name in names]

    @property
    def first_client(self) -> int:
        """Where the clients begin in `names`."""
        return self.prefills + self.decodes

    def prefill_config(self) -> PrefillConfig:
        """Of every P."""
        return PrefillConfig(
            engine="sim",
            block_size=BLOCK,
            num_blocks=self.prefill_blocks,
            chunk_tokens=self.chunk_tokens,
            prefill_batch=2,
            prefix_cache=self.prefix_cache,
            **TIMES,
        )

    def decode_config(self) -> DecodeConfig:
        """Of every D."""
        return DecodeConfig(
            engine="sim",
            block_size=BLOCK,
            num_blocks=self.decode_blocks,
            chunk_tokens=self.chunk_tokens,
            prefix_cache=self.prefix_cache,
            **TIMES,
        )

    def router_config(self) -> RouterConfig:
        """Of the router."""
        return RouterConfig(engine="sim", **TIMES)

    def wishes(self) -> Iterator[Wish]:
        """What each client wants, and where it is sent."""
        targets = self.targets
        prefills, decodes = targets[: self.prefills], targets[self.prefills :]
        prefill_load, decode_load = LeastLoad(), LeastLoad()
        for i, request in enumerate(self.requests):
            if request is None:
                pairing = pair(prefills, decodes, prefill_load, decode_load, False)
            else:
                first, *others = (decodes[d] for d in request[1])
                pairing = Pairing(prefills[request[0]], first, tuple(others))
            length = self.prompts[i % len(self.prompts)]
            lowest = 20 if self.prefix_cache else 20 * (i + 1)
            prompt = tuple(lowest + token for token in range(length))
            assert pairing.prefill is not None
            prefill_load.charge(pairing.prefill.endpoint, length)
            decode_load.charge(pairing.decode.endpoint, length + self.max_tokens)
            yield Wish(prompt, self.max_tokens, pairing, self.budget_s)


SMALL = Scenario(prefills=1, decodes=1, requests=((0, (0,)),), prompts=(3,))
"""One of each, and one request."""

DIRECT = Scenario(
    prefills=1, decodes=1, requests=((0, (0,)),), max_tokens=4, decode_blocks=4, direct=True
)
"""One of each without a router, so that P and D hear of each other's ends from each other alone."""

TWO_DECODES = Scenario(prefills=1, decodes=2, requests=((0, (0, 1)), (0, (1,))))
"""Two Ds behind one P; the first request may turn to either."""

ONE_DECODE = Scenario(prefills=2, decodes=1, requests=((0, (0,)), (1, (0,))))
"""Two Ps before one D, whose blocks are enough for one request at a time."""

ALIKE = Scenario(
    prefills=1,
    decodes=1,
    requests=((0, (0,)), (0, (0,))),
    prompts=(4, 5),
    max_tokens=3,
    prefill_blocks=8,
    decode_blocks=6,
    prefix_cache=1.0,
    fine=False,
)
"""Two requests that begin alike, one of each, and pools that keep what they have seen."""

FULL = (
    Scenario(fine=False),
    Scenario(requests=((0, (0, 1)), (1, (0, 1))), fine=False),
    Scenario(requests=((0, (0, 1)), (0, (0, 1))), fine=False),
    Scenario(requests=((0, (0, 1)), (0, (1, 0))), fine=False),
)
"""Two of each and two requests, in every way to pair them."""

RECOVERY = tuple(
    Scenario(
        prefills=prefills,
        decodes=decodes,
        requests=(None,) * requests,
        max_tokens=3,
        decode_blocks=6,
        fine=False,
        recovery=True,
    )
    for prefills, decodes, requests in ((2, 2, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2))
)
"""Requests that are tried elsewhere: on another pair, on the same D, on the same P, and two."""

ALL = (*FULL, *RECOVERY)
"""What an exploration goes through by default."""

POLLING = Scenario(
    prefills=2,
    decodes=1,
    requests=((0, (0,)), (1, (0,))),
    faults=("lose", "crash", "leave"),
    polling=True,
)
"""The published flows of FastDeploy, two requests on one D."""
