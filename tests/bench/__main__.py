"""``python -m tests.bench [NAME ...]``: the bars of some benchmarks, or of all, in one table.

Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import importlib
import sys
import warnings

BENCHMARKS = (
    "call",
    "transforms",
    "train_step",
    "cold_compile",
    "neighbours",
    "kernels",
    "fp8",
    "lifecycles",
    "interop",
    "random",
)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"Expected names from {', '.join(BENCHMARKS)}, got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    from tests.bench.measure import print_table

    rows = []
    for name in names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"tests.bench.{name}").rows()
    return 0 if print_table(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
