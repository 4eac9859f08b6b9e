"""README says what the code says."""

from __future__ import annotations

from tools.marked_parts import part_names, with_parts
from tools.readme_tables import README, TABLES


def test_the_tables_of_the_readme_are_those_of_the_code() -> None:
    text = README.read_text()
    assert set(part_names(text)) == set(TABLES)
    assert with_parts(text, TABLES) == text, "run `make tables`"
