"""The states of a transfer on D and on P, drawn and as tables, out of their machines."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from pd_grpc.decode.states import STAGES, DecodeState
from pd_grpc.decode.states import TRANSITIONS as ON_DECODE
from pd_grpc.prefill.states import TRANSITIONS as ON_PREFILL
from pd_grpc.prefill.states import PrefillState
from tools.marked_parts import table
from tools.proto_source import File, enums

PREFIX = "TRANSFER_STATE_"


def decode_table(files: Sequence[File]) -> str:
    """D's states: what each means, the stage that STAGE_DEADLINE names in it, what may follow."""
    rows = []
    for state in DecodeState:
        stage = f"`{STAGES[state]}`" if state in STAGES else ""
        follows = _follows(ON_DECODE[state], DecodeState)
        rows.append((f"`{state.name}`", _meaning(state.name, files), stage, follows))
    return table("state | meaning | stage | may become", rows)


def prefill_table(files: Sequence[File]) -> str:
    """P's states: what each means and what may follow."""
    rows = [
        (f"`{s.name}`", _meaning(s.name, files), _follows(ON_PREFILL[s], PrefillState))
        for s in PrefillState
    ]
    return table("state | meaning | may become", rows)


def decode_diagram() -> str:
    """D's states, drawn."""
    return diagram({s.name: {t.name for t in ON_DECODE[s]} for s in DecodeState})


def prefill_diagram() -> str:
    """P's states, drawn."""
    return diagram({s.name: {t.name for t in ON_PREFILL[s]} for s in PrefillState})


def diagram(transitions: Mapping[str, set[str]]) -> str:
    """A mermaid state diagram; the first state is where a transfer begins.

    An end that every state leads to is drawn once, from the frame around them all.
    """
    ends = [state for state, after in transitions.items() if not after]
    living = [state for state in transitions if state not in ends]
    common = [end for end in ends if all(end in transitions[state] for state in living)]
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    direction LR",
        '    state "in flight" as living {',
    ]
    lines += [f"        [*] --> {living[0]}"]
    lines += [
        f"        {state} --> {after}"
        for state in living
        for after in living
        if after in transitions[state]
    ]
    lines += ["    }"]
    lines += [
        f"    {state} --> {end}"
        for state in living
        for end in ends
        if end in transitions[state] and end not in common
    ]
    lines += [f"    living --> {end}" for end in common]
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join([*lines, "```"])


def _follows(
    after: frozenset[DecodeState] | frozenset[PrefillState], order: type[enum.Enum]
) -> str:
    """In the order of the enum; an end says so."""
    names = [f"`{state.name}`" for state in order if state in after]
    return ", ".join(names) or "nothing: an end"


def _meaning(name: str, files: Sequence[File]) -> str:
    """The protocol's own words, without those that say which side they are for."""
    for each in enums(files):
        for value in each.values:
            if value.name == PREFIX + name:
                words = " ".join(value.comment.split())
                return words.partition(": ")[2] or words
    raise KeyError(f"the protos have no {PREFIX}{name}")
