"""Which processes there are, what their clients want, and what may go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig
from pd_grpc.router.policies import LeastLoad, Pairing, Target, pair
from pd_grpc.testing.explorer.client_process import Wish
from pd_grpc.testing.explorer.kv import BLOCK, Cut

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

OF_ROWS = ("spoil", "poison")
"""What may go wrong with one request's row in a step of an engine: no numbers come of it, or every
step that it is in raises."""

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
    None leaves them to the router's policy, None for a P that D is to prefill the request."""

    prefills: int = 2
    decodes: int = 2
    requests: tuple[tuple[int | None, tuple[int, ...]] | None, ...] = (None, None)
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

    one_sided: bool = False
    """Whether Ps write into the memory of their Ds by themselves, where they can."""

    prefill_shards: int = 1
    decode_shards: int = 1
    """Shards of every P and of every D."""

    poisons: tuple[tuple[str, str], ...] = ()
    """Engines, each with a client in whose company it raises from the beginning."""

    heir: bool = False
    """Whether the second P is a later process of the first one's name, which still lives."""

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

    def cut(self, shards: int) -> Cut:
        """Of an instance with so many shards."""
        return Cut(max(self.prefill_shards, self.decode_shards), shards)

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
                prefill = None if request[0] is None else prefills[request[0]]
                pairing = Pairing(prefill, first, tuple(others))
            length = self.prompts[i % len(self.prompts)]
            lowest = 20 if self.prefix_cache else 20 * (i + 1)
            prompt = tuple(lowest + token for token in range(length))
            if pairing.prefill is not None:
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

ALIKE_AND_SPOILT = replace(ALIKE, chunk_tokens=2, faults=("spoil", "leave", "stall"))
"""The same in more steps, and what was computed may turn out to be no numbers."""

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

LENT_ONE = replace(SMALL, chunk_tokens=2, fine=False, one_sided=True)
"""One request of a P that writes into the memory of its D."""

LENT = Scenario(
    prefills=1,
    decodes=1,
    requests=((0, (0,)), (0, (0,))),
    chunk_tokens=2,
    fine=False,
    one_sided=True,
)
"""One P that writes into the memory of one D, whose blocks are enough for one of two requests."""

HEIR = replace(LENT, prefills=2, requests=((0, (0,)), (1, (0,))), heir=True)
"""The same with a second P, a later process of the first one's name."""

LENT_ALIKE = replace(ALIKE, chunk_tokens=2, one_sided=True)
"""Requests that begin alike, and P writes what D lacks of the second."""

LENT_AGAIN = replace(RECOVERY[1], decode_blocks=4, one_sided=True)
"""A request that is tried again on the D in whose memory the P before may still write."""

ONE_SIDED = (LENT, HEIR, LENT_ALIKE, LENT_AGAIN)

ALONE = Scenario(
    prefills=0,
    decodes=1,
    requests=((None, (0,)), (None, (0,))),
    prompts=(3, 5),
    max_tokens=3,
    decode_blocks=5,
    chunk_tokens=2,
    faults=(*FAULTS, *OF_ROWS),
    fine=False,
)
"""Two requests that D prefills itself, chunk by chunk, and that outgrow it: the younger one gives
way."""

BESIDE = replace(ALONE, prefills=1, requests=((0, (0,)), (None, (0,))), prompts=(3,), max_tokens=5)
"""One that is handed over, and beside it one that D prefills itself; together they outgrow it."""

ONE_AT_A_TIME = replace(BESIDE, max_tokens=2, decode_blocks=3)
"""The same on a D whose blocks are enough for one of them."""

ALONE_AGAIN = replace(
    ALONE, decodes=2, requests=((None, (0,)),), prompts=(3,), max_tokens=3, recovery=True
)
"""One that is tried again, on another D or on the same."""

OUTCAST = replace(
    ALONE,
    requests=((None, (0,)),) * 3,
    prompts=(3,),
    max_tokens=2,
    decode_blocks=6,
    poisons=(("d1", "c2"),),
)
"""Three that D prefills itself, and its engine raises over one of them."""

AT_ONE_P = Scenario(
    prefills=1,
    decodes=1,
    requests=((0, (0,)), (0, (0,))),
    prompts=(5, 3),
    prefill_blocks=12,
    decode_blocks=6,
    faults=(*FAULTS, *OF_ROWS),
    fine=False,
    poisons=(("p1", "c2"),),
)
"""Two in one step of their P, the second with the rest of the first, and P's engine raises over one
of them."""

SHARDED = replace(SMALL, decode_shards=2, fine=False)
"""One request of a P that sends to the two shards of its D."""

SHARDED_BOTH = replace(SHARDED, prefill_shards=2)
"""The same of a P with two shards of its own, each of which sends to one."""

GATHERED = replace(SHARDED, prefill_shards=2, decode_shards=1)
"""The same of a P with two shards, both of which send to the only one of D."""

SHARDS = (SHARDED, SHARDED_BOTH, GATHERED)

LOCAL = (ALONE, BESIDE, ONE_AT_A_TIME, ALONE_AGAIN)

ROWS = (OUTCAST, AT_ONE_P)

ALL = (*FULL, *RECOVERY, *ONE_SIDED, *LOCAL, *ROWS, *SHARDS)
"""What an exploration goes through by default."""

POLLING = Scenario(
    prefills=2,
    decodes=1,
    requests=((0, (0,)), (1, (0,))),
    faults=("lose", "crash", "leave"),
    polling=True,
)
"""The published flows of FastDeploy, two requests on one D."""
