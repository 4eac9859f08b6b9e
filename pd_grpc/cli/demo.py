"""`make demo`: one router, one prefill and one decode server answer a few questions."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType

from pd_grpc.cli.cluster import ClusterError, ClusterPlan, LocalCluster
from pd_grpc.cli.console import describe, progress, say_error, stdout
from pd_grpc.cli.span_tree import span_tree, sums
from pd_grpc.cli.trace import fetch_answered
from pd_grpc.client import Answer, Client, Fault, TransportFault

MUST_HOLD = ("What is the capital of France?", "Paris")
OTHERS = (
    "Name the largest ocean on Earth.",
    "What is 2 + 2?",
)
_MAX_TOKENS = 64
_DEADLINE_S = 120.0
_TRACES_KEPT = ("--traces-kept", "16")
_INTERRUPTED = 130

PLAN = ClusterPlan(flags=_TRACES_KEPT, router_flags=_TRACES_KEPT)


def main() -> int:
    """Run the demonstration; returns the exit status, 0 when the answers are right."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    try:
        with contextlib.ExitStack() as stack:
            with progress("starting 1 router, 1 prefill and 1 decode server") as tell:
                cluster = stack.enter_context(LocalCluster(PLAN, tell))
            for name, pid in cluster.processes.items():
                stdout.print(f"{name}: process {pid}")
            client = stack.enter_context(Client(cluster.router_endpoint))
            question, expected = MUST_HOLD
            answer, trace_id = ask(client, question)
            for other in OTHERS:
                ask(client, other)
            show(question, answer, cluster.router_endpoint, trace_id)
            if expected not in answer.text:
                say_error(f"the answer to {question!r} does not contain {expected!r}")
                return 1
            return 0
    except ClusterError as error:
        say_error(str(error))
        return 1
    except (Fault, TransportFault) as error:
        say_error(describe(error, cluster.router_endpoint))
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def ask(client: Client, question: str) -> tuple[Answer, str]:
    """Ask and stream the answer to the terminal; the answer, and the id of its trace."""
    stdout.print(f"\n[bold]{question}[/]")
    answer = Answer()
    with client.generate(
        messages=[("user", question)],
        max_tokens=_MAX_TOKENS,
        temperature=0,
        timeout_s=_DEADLINE_S,
    ) as generation:
        for chunk in generation:
            answer.add(chunk)
            print(chunk.text, end="", flush=True)
    print(flush=True)
    return answer, generation.trace_id


def show(question: str, answer: Answer, router: str, trace_id: str) -> None:
    """Where the time of one request went."""
    end = answer.end
    assert end is not None, "an answer without a last message ends with an error"
    stdout.print(f"\n[bold]Where the time of {question!r} went[/]")
    stdout.print(
        f"prefilled by {end.prefill_instance} ({end.prompt_tokens} tokens), "
        f"decoded by {end.decode_instance} ({end.completion_tokens} tokens)"
    )
    if spans := fetch_answered(router, trace_id):
        stdout.print(span_tree(spans))
        stdout.print("* the answer waited for it")
        for line in sums(spans):
            stdout.print(line)
    stdout.print(f"whole answer after {end.timings_ms['total']:.1f} ms")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
