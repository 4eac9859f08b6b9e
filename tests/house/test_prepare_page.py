"""docs/prepare.md says what the configuration and the names of the metrics say."""

from __future__ import annotations

from pd_grpc.telemetry import names
from tools.marked_parts import part_names, with_parts
from tools.prepare_knobs import PAGE, PARTS


def test_the_knobs_of_the_page_are_those_of_the_configuration() -> None:
    text = PAGE.read_text()
    assert part_names(text) == list(PARTS)
    assert with_parts(text, PARTS) == text, "run `make docs`"


def test_the_page_names_every_metric_of_the_pool() -> None:
    metrics = [value for name, value in vars(names).items() if name.startswith("METRIC_PREPARE_")]
    assert len(metrics) == 5
    text = PAGE.read_text()
    assert [metric for metric in metrics if f"`{metric}`" not in text] == []
