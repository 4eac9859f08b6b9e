"""Step times of the model the reference figures were measured with, but for one unknown.

The reference: one P, one D, a 0.3B model, 1,000 requests of 1,280 tokens in and 700 out on average,
256 at once. Prepared one after another they took 275 s, with five threads 260 s. That is some
95 ms for a decode step of 256 requests, of which the accelerator has little:

- *Weights*: 0.36e9 parameters of 2 bytes, read once a step at 2 TB/s, 0.36 ms.
- *KV*: 18 layers, 2 KV heads of 128, K and V of 2 bytes are 18,432 bytes a token, 9.2e-6 ms at
  2 TB/s; 3.8 ms for 256 contexts of 1,630 tokens.
- *Prompt*: 2 * 0.36e9 operations a token at 150e12 a second, 0.0048 ms.

The sizes are those of ERNIE-4.5-0.3B, the rates those of one A100-class device; none is fitted. The
rest is the host's own time for a step (scheduling, launching, sampling, passing tokens on), the
same for each step of either side and for any batch: `floor_ms`, the one free parameter. It is
fitted to the serial row alone; see `calibrate`.
"""

from __future__ import annotations

from pd_grpc.engine.step_table import StepTable

WEIGHTS_MS = 0.36
KV_TOKEN_MS = 9.2e-6
PROMPT_TOKEN_MS = 0.0048

SERIAL_S = 275.0
"""The reference's time when requests are prepared one after another: what is fitted."""
THREADS5_S = 260.0
"""The reference's time with five threads: what is predicted, and never fitted."""

REQUESTS = 1000
CONCURRENCY = 256
INPUT_TOKENS = 1280
OUTPUT_TOKENS = 700

PREFILL_BATCH = 16
CHUNK_TOKENS = 16_384
"""What P computes in a step. With half of it P's computing is what every row but the serial one
waits for, and nothing is left by which ways to prepare could differ."""

_MANY = 1 << 16


def seed_steps(floor_ms: float) -> StepTable:
    """The table for a host that needs `floor_ms` for a step."""
    step_ms = floor_ms + WEIGHTS_MS
    return StepTable(
        prefill=((1, step_ms), (_MANY, step_ms + _MANY * PROMPT_TOKEN_MS)),
        decode=((1, step_ms), (_MANY, step_ms)),
        decode_context_ms=KV_TOKEN_MS,
    )
