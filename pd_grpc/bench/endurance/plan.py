"""What a soak does, worked out from its seed alone: the same seed sends the same requests and does
the same harm, in the same order.

It goes by slots. In each, some requests are sent and one thing goes wrong, at times counted from
the slot's beginning; a slot is over when its time is and what went wrong has been put right. So
never two things are wrong at a time, however long a machine takes to bring a process back.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pd_grpc.bench.endurance.fleet import ROUTER
from pd_grpc.bench.trace import Arrival
from pd_grpc.protocol.sampling import Sampling

SHRINK = 8
"""The lengths of the trace are divided by this."""
SLOT_S = 1.2
REQUESTS_PER_SLOT = 19
HEARTBEAT_S = 1.0
"""Between P and D, and of the keepalive on every connection."""
NOTICED_FROM_S = 2 * HEARTBEAT_S + 0.2
"""Silence as long as this is to be noticed."""
BUDGET_S = 30.0
"""Of a request that is to be answered whole."""
VOCAB = 600
"""So small that most words are parts of characters, and that some answers end by themselves."""
_LONGEST_PROMPT, _LONGEST_OUTPUT = 480, 120
_UNHARMED_FROM = 0.4
"""From this part of the run on P and D number 0 are not killed or restarted any more, so that there
are processes whose memory and blocks can be followed."""


class Manner(str, enum.Enum):
    """What a client does."""

    PLAIN = "plain"
    CANCEL = "cancel"
    """It leaves after `leaves_after_s`."""
    DEADLINE = "deadline"
    """Its budget may be too short."""
    REPEATED = "repeated"
    """It is answered, or the duplicate that follows it is, if that comes first after all."""
    DUPLICATE = "duplicate"
    """It sends the request before it once more, while that is under way."""
    INVALID = "invalid"
    """What it asks for cannot be."""


class FaultKind(str, enum.Enum):
    """What goes wrong."""

    KILL = "kill"
    """SIGKILL, and back after `lasts_s`."""
    RESTART = "restart"
    """It drains, for `lasts_s` at most, and is started again."""
    STOP = "stop"
    """SIGSTOP for `lasts_s`."""
    CUT = "cut"
    """Nothing passes between `client` and the target for `lasts_s`; 0 closes the connections."""
    CORRUPT = "corrupt"
    """One bit of each of the next `chunks` KV chunks for the target is another one."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request. A duplicate has the name and body of the one before it."""

    name: str
    at_s: float
    manner: Manner
    prompt: tuple[int, ...]
    as_text: str
    """The prompt as text, or empty where it is sent as token ids."""
    sampling: Sampling
    budget_s: float = BUDGET_S
    leaves_after_s: float = 0.0


@dataclass(frozen=True)
class PlannedFault:
    """One thing that goes wrong; fields that its kind does not need are 0 or empty."""

    kind: FaultKind
    at_s: float
    target: str
    lasts_s: float = 0.0
    client: str = ""
    port: str = ""
    chunks: int = 0


@dataclass(frozen=True)
class Slot:
    """Requests in the order of their times, and what goes wrong meanwhile."""

    requests: Sequence[PlannedRequest]
    fault: PlannedFault


def plan_slots(requests: int, seed: int, trace: Sequence[Arrival]) -> Iterator[Slot]:
    """The slots of a run of so many requests; the last may have fewer of them."""
    slots = -(-requests // REQUESTS_PER_SLOT)
    begin = random.Random(f"{seed}").randrange(len(trace))
    for i in range(slots):
        numbers = range(i * REQUESTS_PER_SLOT, min(requests, (i + 1) * REQUESTS_PER_SLOT))
        fault = _fault(random.Random(f"{seed}/fault/{i}"), i / slots)
        yield Slot(_requests(numbers, seed, begin, trace), fault)


def _requests(
    numbers: Sequence[int], seed: int, begin: int, trace: Sequence[Arrival]
) -> list[PlannedRequest]:
    draw = random.Random(f"{seed}/arrivals/{numbers[0]}")
    times = sorted(draw.uniform(0, SLOT_S) for _ in numbers)
    planned: list[PlannedRequest] = []
    for number, at_s in zip(numbers, times, strict=True):
        draw = random.Random(f"{seed}/request/{number}")
        before = planned[-1] if planned else None
        length = trace[(begin + number) % len(trace)].length
        if before is not None and before.manner is Manner.PLAIN and draw.random() < 0.06:
            planned[-1] = replace(before, manner=Manner.REPEATED)
            # At the same time, so that the first is still under way wherever it can be.
            planned.append(replace(before, manner=Manner.DUPLICATE))
        else:
            prompt = min(max(1, length.prompt // SHRINK), _LONGEST_PROMPT)
            output = min(max(1, length.output // SHRINK), _LONGEST_OUTPUT)
            planned.append(_request(f"s{seed}-{number}", at_s, draw, prompt, output))
    return planned


def _request(
    name: str, at_s: float, draw: random.Random, prompt: int, output: int
) -> PlannedRequest:
    manner = draw.choices(
        (Manner.PLAIN, Manner.CANCEL, Manner.DEADLINE, Manner.INVALID), (82, 9, 7, 2)
    )[0]
    as_text = ""
    if draw.random() < 0.2:
        as_text = "".join(draw.choice("abc äöü 日本 \U0001f642") for _ in range(-(-prompt // 2)))
        token_ids = tuple(3 + byte for byte in as_text.encode())
    else:
        # Some begin alike, for the sake of what is kept of a prefix.
        shared = draw.randrange(4) if draw.random() < 0.3 else None
        first = random.Random(shared) if shared is not None else draw
        head = [first.randrange(3, VOCAB) for _ in range(min(prompt, 64))]
        token_ids = (*head, *(draw.randrange(3, VOCAB) for _ in range(prompt - len(head))))
    temperature = draw.choice((0.0, 0.7, 1.0))
    sampling = Sampling(
        max_tokens=output,
        min_tokens=0,
        temperature=temperature,
        top_p=draw.choice((1.0, 0.5)),
        top_k=draw.choice((0, 40)),
        seed=draw.randrange(2**63),
        stop=draw.choice(((), (), (), ("w5",))),
        stop_token_ids=(draw.randrange(3, VOCAB),),
        ignore_eos=draw.random() < 0.5,
    )
    return PlannedRequest(
        name,
        at_s,
        manner,
        token_ids,
        as_text,
        sampling,
        budget_s=draw.uniform(0.05, 0.8) if manner is Manner.DEADLINE else BUDGET_S,
        leaves_after_s=draw.uniform(0.0, 0.8) if manner is Manner.CANCEL else 0.0,
    )


def _fault(draw: random.Random, part: float) -> PlannedFault:
    kind = draw.choices(tuple(FaultKind), (25, 12, 25, 26, 12))[0]
    at_s = draw.uniform(0.0, 0.6 * SLOT_S)
    ending = kind in (FaultKind.KILL, FaultKind.RESTART)
    spared = ending and part >= _UNHARMED_FROM
    target = draw.choice(("p1", "d1") if spared else ("p0", "p1", "d0", "d1"))
    if kind is FaultKind.KILL:
        return PlannedFault(kind, at_s, target, lasts_s=draw.uniform(0.0, 0.5))
    if kind is FaultKind.RESTART:
        return PlannedFault(kind, at_s, target, lasts_s=draw.choice((0.0, 0.5, 2.0)))
    # Shorter than anybody notices, or longer than twice the heartbeat.
    brief, long = draw.uniform(0.05, 0.4), NOTICED_FROM_S + draw.uniform(0.1, 0.6)
    lasts_s = draw.choice((brief, long))
    if kind is FaultKind.STOP:
        return PlannedFault(kind, at_s, target, lasts_s=lasts_s)
    if kind is FaultKind.CORRUPT:
        return PlannedFault(kind, at_s, draw.choice(("d0", "d1")), chunks=draw.choice((1, 1, 3)))
    clients = (ROUTER,) if target in ("p0", "p1") else (ROUTER, "p0", "p1")
    client = draw.choice(clients)
    port = "endpoint" if client == ROUTER else draw.choice(("endpoint", "bulk"))
    closes = draw.random() < 0.3
    return PlannedFault(
        kind, at_s, target, lasts_s=0.0 if closes else lasts_s, client=client, port=port
    )
