"""README says what the code says."""

from __future__ import annotations

from tools.readme_tables import README, TABLES, with_tables


def test_the_tables_of_the_readme_are_those_of_the_code() -> None:
    text = README.read_text()
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)
    assert with_tables(text) == text, "run `make tables`"
