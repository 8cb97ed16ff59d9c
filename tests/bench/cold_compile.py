"""From a fresh process with empty caches to the first training step of the GPT. Bar: 1.2 of `torch.compile`.

Each side runs in processes of its own, in turn; imports and the model are not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from tests.bench.measure import Row, print_table

REPEATS = 3
COMMON = """
import time
import torch
import scoped_fn as sf
from tests.bench.train_step import model_and_batch
import torch._dynamo, torch._inductor.compile_fx
model, batch = model_and_batch()
model(*batch).backward()
model.zero_grad()
started = time.perf_counter()
"""
SIDES = {
    "value_and_grad": "state, fn = sf.compile(sf.init_state(), model, batch)\n"
    "sf.value_and_grad(fn)(state, fn.params, *batch)\n",
    "autograd": "state, fn = sf.compile(sf.init_state(), model, batch)\nfn(state, fn.params, *batch)[1].backward()\n",
    "torch.compile": "torch.compile(model)(*batch).backward()\n",
}


def _seconds(side: str) -> float:
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": caches}
        script = COMMON + SIDES[side] + "print(time.perf_counter() - started)"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split()[-1])


def rows() -> list[Row]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(REPEATS):
        for side, taken in times.items():
            taken.append(_seconds(side))
    seconds = {side: statistics.median(taken) for side, taken in times.items()}
    return [
        Row(
            f"cold compile and first step by {ours}, GPT 4 x 128",
            "torch.compile",
            f"{seconds[ours]:.1f} s",
            f"{seconds['torch.compile']:.1f} s",
            seconds[ours] / seconds["torch.compile"],
            1.2,
        )
        for ours in ("autograd", "value_and_grad")
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
