"""How long a launch takes on the GPU."""

from __future__ import annotations

from collections.abc import Callable

from triton.testing import do_bench


def median_us(run: Callable[[], object]) -> float:
    """Returns the median microseconds of a call on the GPU, with cold caches and without the time of the host."""
    return 1e3 * float(do_bench(run, warmup=10, rep=100, return_mode="median"))
