"""The log-probabilities of an answer's tokens, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pd_grpc.client import Answer
from pd_grpc.v1 import types_pb2

_HEAD = f"{'token':>7}  {'logprob':>9}"


def as_objects(answer: Answer) -> list[dict[str, Any]]:
    """One for each token, where they were asked for; `top` are the likeliest, best first."""
    return [
        {**_as_object(position.chosen), "top": [_as_object(each) for each in position.top]}
        for position in answer.logprobs
    ]


def _as_object(token: types_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "logprob": token.logprob}


def as_lines(answers: Sequence[Answer]) -> Iterator[str]:
    """A table with a line for each token, by its id. Of several answers each line begins with the
    number of its own."""
    margins = [f"[{number}] " for number in range(len(answers))] if len(answers) > 1 else [""]
    width = len(margins[-1])
    likeliest = any(position.top for answer in answers for position in answer.logprobs)
    yield " " * width + _HEAD + ("  likeliest" if likeliest else "")
    for margin, answer in zip(margins, answers, strict=True):
        for position in answer.logprobs:
            cells = [_cell(each) for each in (position.chosen, *position.top)]
            yield margin.ljust(width) + "  ".join(cells)


def _cell(token: types_pb2.TokenLogprob) -> str:
    return f"{token.token_id:>7}  {token.logprob:>9.4f}"
