"""Compiling a grammar for a trial, in a process that may be lost.

The library bounds the work of each part of a grammar and not of them all: 50 patterns joined by
`allOf` in 2 KB of JSON schema keep it busy for longer than anybody would wait, and nothing stops a
thread. So what a client sends is first compiled here, in a process of its own with its own bounds
of time and memory. What comes through is compiled again where it is needed, which takes as long as
it took here.

    python -m pd_grpc.engine.grammar_trial CPU_S MEMORY_BYTES < grammar
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits

CPU_S = 2.0
"""Of one processor; the widest schema of 64 KiB that was tried took 1.7 s."""
WALL_S = 20.0
"""For a machine on which others run as well."""
MEMORY_BYTES = 256 << 20
MAX_SIMPLE_BYTES = 4096

_LEXER_STATES = 50_000
_GRAMMAR_SIZE = 50_000
_DEAR = (b"\\", b"allOf", b"oneOf", b"$ref", b"attern", b"format")
"""What combines with what stands beside it, or might be one of these in disguise. Without these the
work grows with the text, and 4 KiB of it take milliseconds."""


def limits() -> LLParserLimits:
    """Bounds of one grammar: the work for one mask takes at most some 20 ms, its lexer some 50
    MiB. The largest schema of use that was tried has a size of 8,000 symbols."""
    return LLParserLimits(
        max_lexer_states=_LEXER_STATES, max_grammar_size=_GRAMMAR_SIZE, verbose_errors=False
    )


def needs_trial(json_schema: str) -> bool:
    """Whether a schema could take long. A regular expression never does: the library's own bounds
    hold for it."""
    text = json_schema.encode()
    return len(text) > MAX_SIMPLE_BYTES or any(word in text for word in _DEAR)


class Stopped(RuntimeError):
    """No grammar is tried any more."""


class Trials:
    """Tries grammars until it is stopped. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def try_grammar(
        self, grammar: str, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES
    ) -> str:
        """Compile `grammar`, in the library's own form, in a process of its own. What is wrong with
        it, empty when nothing is. RuntimeError when that process could not do its work, Stopped
        when `stop` ended it or came before. Takes seconds, so it is not for the loop."""
        too_long = f"takes more than {cpu_s:g} s to compile"
        process = self._begin(cpu_s, memory_bytes)
        with process:
            try:
                told, errors = process.communicate(grammar.encode(), WALL_S)
            except subprocess.TimeoutExpired:
                return too_long
            finally:
                process.kill()
                with self._lock:
                    self._running.discard(process)
        if self._stopped:
            raise Stopped("no grammar is tried any more")
        status = process.returncode
        if status == 0:
            return told.decode()
        if status == -signal.SIGPROF:
            return too_long
        if status in (-signal.SIGABRT, -signal.SIGSEGV):
            return f"takes more than {memory_bytes >> 20} MiB, or too deep a stack, to compile"
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the trial of a grammar ended with {status}: {last}")

    def stop(self) -> None:
        """End the trials under way, and begin no other."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()

    def _begin(self, cpu_s: float, memory_bytes: int) -> subprocess.Popen[bytes]:
        bounds = [str(cpu_s), str(memory_bytes)]
        command = [sys.executable, "-m", "pd_grpc.engine.grammar_trial", *bounds]
        # As this process imports, so shall that one, wherever it was started from.
        path = os.pathsep.join(each for each in sys.path if each)
        with self._lock:
            if self._stopped:
                raise Stopped("no grammar is tried any more")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._running.add(process)
        return process


def main() -> None:
    """Read a grammar, and say what is wrong with it."""
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    grammar = sys.stdin.buffer.read().decode()
    allowed = limits()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nobody handles the signal, so that it ends the process wherever it is.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    wrong = LLMatcher.validate_grammar(grammar, limits=allowed)
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(wrong.encode())


if __name__ == "__main__":
    main()
