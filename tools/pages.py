"""Writes the parts of the pages that come from protos and code.

python -m tools.pages [PAGE ...]    such as README.md; without one, all of them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tools import (
    case_tables,
    engine_speed,
    kv_page,
    load_figures,
    log_tables,
    observability_page,
    prepare_figures,
    prepare_knobs,
    protocol_reference,
    readme_tables,
    serve_page,
    sim_page,
)
from tools.marked_parts import Parts, with_parts
from tools.proto_source import ROOT, read_protos

PAGES: dict[str, Callable[[], Parts]] = {
    "README.md": lambda: readme_tables.TABLES,
    "docs/conformance.md": lambda: case_tables.TABLES,
    "docs/engine.md": lambda: {**engine_speed.PARTS, **load_figures.PARTS},
    "docs/kv.md": lambda: kv_page.PARTS,
    "docs/logs.md": lambda: log_tables.TABLES,
    "docs/observability.md": lambda: observability_page.PARTS,
    "docs/prepare.md": lambda: {**prepare_knobs.PARTS, **prepare_figures.PARTS},
    "docs/protocol.md": lambda: protocol_reference.parts(read_protos()),
    "docs/serve.md": lambda: serve_page.PARTS,
    "docs/sim.md": lambda: sim_page.PARTS,
}
"""What makes the parts of each page."""


def main(pages: Sequence[str]) -> int:
    """Rewrite pages in place. KeyError for one that has no such parts."""
    for page in pages or PAGES:
        path = ROOT / page
        text = with_parts(path.read_text(encoding="utf-8"), PAGES[page]())
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
