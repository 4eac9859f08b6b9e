"""A grammar that takes minutes to compile, and the processes that try one."""

from __future__ import annotations

import json

import psutil

from pd_grpc.v1 import sampling_pb2

_PATTERNS = [{"type": "string", "pattern": f".*{i}.*"} for i in range(50)]
HOSTILE = sampling_pb2.SamplingParams(
    max_tokens=8,
    structured_output=sampling_pb2.StructuredOutput(json_schema=json.dumps({"allOf": _PATTERNS})),
)


def trials_under_way() -> list[psutil.Process]:
    """Processes of this one that try a grammar."""
    children = psutil.Process().children()
    return [child for child in children if "pd_grpc.engine.grammar_trial" in child.cmdline()]
