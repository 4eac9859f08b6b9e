"""docs/protocol.md says what the protos and the machines say, and no link of a page is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.pages import ROOT, anchors, arrows, broken_links, drawn_names, names_of
from tools.marked_parts import table, with_parts
from tools.proto_source import File, Message, enums, messages, read_protos
from tools.protocol_reference import cell, parts, prose, reference
from tools.state_tables import diagram

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def files() -> list[File]:
    return read_protos()


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


# --- the page ------------------------------------------------------------------------------------


def test_a_page_that_a_comment_has_left_behind_is_stale(files: list[File], text: str) -> None:
    before = "How long D remembers a transfer that has ended"
    assert before in text
    older = text.replace(before, "For how long D remembers a transfer")
    assert with_parts(older, parts(files)) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_to_a_heading_or_a_file_that_is_not_there_is_broken(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Here\n```\n# not a heading\n```\n", encoding="utf-8")
    page.write_text(
        "# A.B\n[a](#ab) [b](#a-b) [c](other.md#here) [d](other.md#not-a-heading) "
        "[e](gone.md) [f](https://example.org/gone)\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#a-b", "other.md#not-a-heading", "gone.md"]


def test_no_two_headings_of_the_page_share_an_anchor(text: str) -> None:
    found = anchors(text)
    assert len(found) == len(set(found))
    assert not [anchor for anchor in found if anchor.endswith("-1")]


# --- the drawn request ---------------------------------------------------------------------------


def test_the_drawing_names_what_the_protos_have(files: list[File], text: str) -> None:
    assert drawn_names(text) - names_of(files) == set()


def test_every_arrow_of_the_drawing_names_something_of_the_protos(text: str) -> None:
    said = arrows(text)
    assert len(said) > 20
    known = drawn_names(text)
    assert [words for words in said if not any(name in words for name in known)] == []


def test_the_drawing_has_every_call_of_a_hand_over(text: str) -> None:
    methods = {
        "DecodeService.Session",
        "DecodeService.Allocate",
        "DecodeService.SendFirstToken",
        "TransferService.Transfer",
        "PrefillService.Prefill",
        "InferenceService.Generate",
    }
    assert methods <= drawn_names(text)


def test_a_name_that_the_protos_do_not_have_is_found(files: list[File]) -> None:
    drawing = (
        "```mermaid\nsequenceDiagram\n    P->>D: DecodeService.Reserve with Hello.instance\n"
        "    D-->>P: Welcome.session\n```\n"
    )
    assert drawn_names(drawing) - names_of(files) == {"DecodeService.Reserve", "Welcome.session"}


# --- how it is made ------------------------------------------------------------------------------


def test_everything_in_the_protos_has_a_comment_in_the_reference(files: list[File]) -> None:
    made = reference(files)
    for message in messages(files):
        assert f"#### {message.name}\n" in made
        for field in message.fields:
            assert field.comment, f"{message.name}.{field.name}"
            assert cell(field.comment).replace("|", "\\|") in made
    for enum in enums(files):
        assert all(f"| `{value.name}` " in made for value in enum.values)


def test_reserved_fields_and_values_are_marked(files: list[File]) -> None:
    made = reference(files)
    for name in ("prompt_logprobs", "draft_token_ids", "grant_needs_client", "PLANE_KIND_STATE"):
        assert f"`{name}` *(reserved)*" in made
    assert "`temperature` *(reserved)*" not in made
    assert "`min_p` *(reserved)*" not in made


def test_what_was_given_up_stays_in_the_reference() -> None:
    gone = Message("Old", "Of old.", (), {}, ("3", "7 to 9", "name"))
    made = reference([File("old", "", (), (gone,))])
    for given_up in ("3", "7 to 9", "name"):
        assert f"| {given_up} | *reserved: given up* |" in made


def test_types_lead_to_their_sections(files: list[File]) -> None:
    made = reference(files)
    assert "| 6 | `shards` | repeated [Shard](#shard) |" in made
    assert "| 7 | `lease` | `google.protobuf.Duration` |" in made
    assert "map\\<`uint32`, `double`>" in made
    assert "| 3 | `temperature` | optional `double` |" in made


def test_a_comment_with_lines_set_in_is_shown_as_it_is() -> None:
    comment = "A block is:\n\n  for each layer\n    for each head\n\nNothing\nelse."
    assert prose(comment) == (
        "A block is:\n\n```text\nfor each layer\n  for each head\n```\n\nNothing else."
    )


def test_a_cell_keeps_to_its_line_and_its_column() -> None:
    made = table("a | b", [("x", cell("one\ntwo\n\n<three> | four"))])
    assert made.splitlines()[2] == "| x | one two<br>\\<three> \\| four |"


def test_an_end_that_not_every_state_leads_to_is_drawn_from_those_that_do() -> None:
    made = diagram({"A": {"B", "BAD"}, "B": {"GOOD", "BAD"}, "GOOD": set(), "BAD": set()})
    edges = [line.strip() for line in made.splitlines() if "-->" in line]
    assert edges == [
        "[*] --> A",
        "A --> B",
        "B --> GOOD",
        "living --> BAD",
        "GOOD --> [*]",
        "BAD --> [*]",
    ]
