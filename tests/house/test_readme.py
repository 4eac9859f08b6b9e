"""README and the pages say what the code says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pd_grpc.cli.commands import app
from pd_grpc.cli.settings import ROLES, settings_table
from tests.house.pages import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "node" / "README.md"]


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every call of pd-grpc that a page shows, without the command itself."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if line.startswith("pd-grpc "):
                yield shlex.split(line, comments=True)[1:]


def unknown_words(words: list[str]) -> list[str]:
    """The options and subcommands of a call that the command does not have."""
    command: Any = typer.main.get_command(app)
    names = []
    while hasattr(command, "commands") and words:
        name, *words = words
        if name not in command.commands:
            return [name]
        names.append(name)
        command = command.commands[name]
    known = {"--help", *(option for param in command.params for option in param.opts)}
    if names[0] == "serve":
        known |= {"--config", *(row.flag for row in settings_table(ROLES[names[-1]]))}
    return [word for word in words if word.startswith("--") and word not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    assert [(words, bad) for words in commands_of(page) if (bad := unknown_words(words))] == []


def test_every_setting_of_every_role_is_in_a_table_of_the_readme() -> None:
    tables = re.findall(r"^\| `(--[a-z-]+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    flags = {row.flag for role in ROLES.values() for row in settings_table(role)}
    assert flags - set(tables) == set()


def test_commands_that_are_not_there_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    calls = [
        "$ pd-grpc conformance --decode h:1 \\\n    --onyl D1  # one",
        "pd-grpc serve decode --port 1 --prot 2",
        "pd-grpc judge",
    ]
    page.write_text("\n".join(["```console", *calls, "```", ""]))
    unknown = [unknown_words(words) for words in commands_of(page)]
    assert unknown == [["--onyl"], ["--prot"], ["judge"]]
    assert any(words[0] == "conformance" for words in commands_of(README))
