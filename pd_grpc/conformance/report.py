"""What a run of the kit tells people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from pd_grpc.conformance.run import Result

_WORDS = {True: "[green]passed[/]", False: "[red]FAILED[/]", None: "[yellow]n/a[/]"}


def as_object(
    subject: dict[str, Any], results: Sequence[Result], interrupted: bool = False
) -> dict[str, Any]:
    """A run as JSON: the subject, whether the run ended before its last case, the counts, and each
    case that was judged. `passed` is null for a case that does not apply to the subject."""
    return {
        "subject": subject,
        "interrupted": interrupted,
        "passed": sum(r.passed is True for r in results),
        "failed": sum(r.passed is False for r in results),
        "not_applicable": sum(r.passed is None for r in results),
        "seconds": round(sum(r.seconds for r in results), 3),
        "cases": [
            {
                "id": r.id,
                "rule": r.rule,
                "passed": r.passed,
                "explanation": r.explanation,
                "title": r.title,
                "messages": r.messages,
                "seconds": round(r.seconds, 3),
                "failed_before": r.failed_before,
            }
            for r in results
        ],
    }


def as_table(results: Sequence[Result]) -> Table:
    """Every case with the rule it tests."""
    table = Table()
    for column in ("case", "", "rule", "s"):
        table.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
    for r in results:
        word = _WORDS[r.passed]
        if r.failed_before:
            word += f", try {len(r.failed_before) + 1}"
        table.add_row(r.id, word, escape(r.rule), f"{r.seconds:.2f}")
    return table


def unsteady(results: Sequence[Result]) -> list[str]:
    """A line for each case that passed, but not at its first try, and why that failed."""
    return [
        f"{r.id} passed at try {len(r.failed_before) + 1}; before: {r.failed_before[-1]}"
        for r in results
        if r.passed and r.failed_before
    ]


def explained(result: Result) -> str:
    """Why a case failed, with the messages exchanged."""
    lines = [
        f"{result.id} FAILED",
        f"  rule:  {result.rule}",
        f"  done:  {result.title}",
        f"  why:   {result.explanation}",
        *(f"  before: {explanation}" for explanation in result.failed_before),
    ]
    if result.messages:
        lines.append("  the last messages (-> sent by the kit, <- by the subject):")
        lines += [f"  {line}" for line in result.messages]
    return "\n".join(lines)
