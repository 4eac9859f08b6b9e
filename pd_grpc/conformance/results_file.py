"""The results of a run as a JSON file that is there while the run goes on."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_grpc.conformance.report import as_object
from pd_grpc.conformance.run import Result


class CannotWrite(Exception):
    """The file cannot be opened or written: says which, and why."""


class ResultsFile:
    """Holds what has been judged so far, with `interrupted` true until the run is at its end: a
    run that is killed leaves the cases that it came to. What is no file that can be rewritten, such
    as a pipe, gets the results once, when they are closed."""

    def __init__(self, path: Path) -> None:
        """Empties the file. CannotWrite when it cannot be opened."""
        self._path = path
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise CannotWrite(f"{path}: {error.strerror}") from error
        self._rewritten = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def write(self, subject: dict[str, Any], results: Sequence[Result]) -> None:
        """The run goes on: put down what it has come to. CannotWrite."""
        if self._rewritten:
            self._put(subject, results, interrupted=True)

    def close(self, subject: dict[str, Any], results: Sequence[Result], interrupted: bool) -> None:
        """The run is over, whether at its end or before. CannotWrite."""
        self._put(subject, results, interrupted)
        self._file.close()

    def _put(self, subject: dict[str, Any], results: Sequence[Result], interrupted: bool) -> None:
        text = json.dumps(as_object(subject, results, interrupted), indent=1) + "\n"
        try:
            if self._rewritten:
                self._file.seek(0)
            self._file.write(text.encode())
            self._file.flush()
            if self._rewritten:
                # Only now, so that a reader in between finds the old results and not none.
                self._file.truncate()
        except OSError as error:
            raise CannotWrite(f"{self._path}: {error.strerror}") from error
