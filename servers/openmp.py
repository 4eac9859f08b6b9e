"""How torch's threads wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "GOMP_SPINCOUNT"
SPINS = 1000
"""Turns of a waiting thread before it gives its core away. libgomp's own are 300,000: some
milliseconds, in which two servers that share cores keep each other from the very threads they wait
for. Two of two threads each on two cores, of SmolLM2's shapes: a pass of one token took 86 ms with
libgomp's own and 37 with these, one of 512 tokens 1.22 and 0.89 s. They cost one that is alone: a D
of SmolLM2 took 43 ms for a token with libgomp's own and 52 with these, and for a prompt of 1,024
1.19 and 1.29 s."""
PREFILL_SPINS = 10_000
"""The same of a P that was told its threads. It shares its cores with its own sending at least, and
has few and long products: a prompt of 1,024 on the same two cores, without anything else to do,
took 1.13 s with these, 1.12 with libgomp's own and 1.21 with 1000. Beside a D with 1000, and other
work on the machine, 16 of 16 requests of a load were answered within 40 s; with libgomp's own in P
7 were."""

_TOLD = (SPIN_COUNT, "OMP_WAIT_POLICY")


def wait_as_fits(
    environ: MutableMapping[str, str], role: str, threads: int, crowded: bool = False
) -> bool:
    """Have the threads of a prefill or decode server wait for each other as fits where it runs.

    `threads` are those that it was told to have, 0 for none told: it may then not be alone on its
    cores. `crowded` says that it certainly is not. Anything but a P waits as libgomp does where it
    was told its threads and is not crowded.

    libgomp reads it when torch is imported, so it comes before that. Returns whether it was done: a
    process that was told how to wait keeps to that.
    """
    spins = _spins(role, threads, crowded)
    if spins is None or any(name in environ for name in _TOLD):
        return False
    environ[SPIN_COUNT] = str(spins)
    return True


def _spins(role: str, threads: int, crowded: bool) -> int | None:
    """None leaves libgomp's own."""
    if not threads:
        return SPINS
    if role == "prefill":
        return PREFILL_SPINS
    return SPINS if crowded else None
