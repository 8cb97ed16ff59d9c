"""How long a launch takes on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

# Zeroed before each call: that empties the L2 cache, and takes the GPU longer than the host takes to launch the call.
FLUSHED_BYTES = 2**30


def median_us(run: Callable[[], object], *, repeats: int = 50) -> float:
    """Returns the median microseconds of a call on the GPU, with cold caches and without the time of the host."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    for start, end in events:
        flushed.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * median(float(start.elapsed_time(end)) for start, end in events)
