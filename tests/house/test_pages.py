"""The parts of the pages that come from protos and code are what protos and code say."""

from __future__ import annotations

import pytest

from tools.marked_parts import part_names, with_parts
from tools.pages import PAGES
from tools.proto_source import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_the_parts_of_a_page_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = PAGES[page]()
    assert sorted(part_names(text)) == sorted(parts)
    assert with_parts(text, parts) == text, "run `make docs`"


def test_every_page_that_has_such_parts_is_written() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    with_such = [page for page in pages if part_names(page.read_text(encoding="utf-8"))]
    assert [str(page.relative_to(ROOT)) for page in with_such] == sorted(PAGES)
