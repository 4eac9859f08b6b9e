"""docs/prepare.md says what the names of the metrics say."""

from __future__ import annotations

from pd_grpc.telemetry import names
from tests.house.pages import ROOT


def test_the_page_names_every_metric_of_the_pool() -> None:
    metrics = [value for name, value in vars(names).items() if name.startswith("METRIC_PREPARE_")]
    assert len(metrics) == 5
    text = (ROOT / "docs" / "prepare.md").read_text(encoding="utf-8")
    assert [metric for metric in metrics if f"`{metric}`" not in text] == []
