"""Where the figures of a long run go: nothing that was measured is lost when it ends early."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pd_grpc.bench.plot import check_plot, plot_rows
from pd_grpc.bench.seed_run import SeedRun


class NoPlace(ValueError):
    """Figures or plot cannot be written there; the message says why."""


class Results:
    """Of one run. What is there so far is in `FILE.part` beside the JSON file, which takes the
    place of FILE when the run is complete; an older FILE stays until then. The plot is drawn once
    the seed workload has been run. Either path may be None."""

    def __init__(self, json_file: Path | None, plot: Path | None, title: str) -> None:
        """NoPlace for a path that cannot be written, before anything has run."""
        self.figures: dict[str, Any] = {}
        """The last that were kept."""
        self.part = json_file and json_file.with_name(json_file.name + ".part")
        self._json = json_file
        self._plot = plot
        self._title = title
        self._drawn = False
        for option, path in (("--json", json_file), ("--plot", plot)):
            if path is not None and path.is_dir():
                raise NoPlace(f"{option} {path}: Is a directory")
        if plot is not None:
            try:
                check_plot(plot)
            except ValueError as error:
                raise NoPlace(f"--plot {plot}: {error}") from error
        for option, path in (("--json", self.part), ("--plot", plot)):
            if path is not None:
                _try_to_write(option, path)

    def keep(self, figures: Mapping[str, Any], runs: Sequence[SeedRun]) -> None:
        """What is known so far; `runs` are those of the seed workload, none until it is complete.
        A disk that does not take it ends no run: the next may be taken."""
        self.figures = dict(figures)
        with contextlib.suppress(OSError):
            self._write()
            if self._plot is not None and runs and not self._drawn:
                plot_rows(runs, self._title, self._plot)
                self._drawn = True

    def complete(self) -> None:
        """The run has come to its end. OSError when the disk does not take its figures."""
        self._write()
        if self.part is not None and self._json is not None:
            self.part.replace(self._json)

    def _write(self) -> None:
        if self.part is not None:
            self.part.write_text(json.dumps(self.figures, indent=1) + "\n")


def _try_to_write(option: str, path: Path) -> None:
    """Open a file for writing, and leave everything as it was."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise NoPlace(f"{option} {path}: {error.strerror}") from error
    if not existed:
        path.unlink()
