"""What the bridge to JAX costs: a torch function inside `jax.jit` against a direct call, 4 MB of inputs.

Bar: 200 microseconds beyond the direct call and the copies that must be made. A sum makes none: its input is lent, and
its result is one number. A product has to copy its result into a new buffer of XLA, and what new memory costs is up to
the allocators: it is shown beside a callback written by hand that does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.buffer_callback import buffer_callback

import scoped_fn as sf
from scoped_fn.interop import from_jax, jax_to_torch, to_jax, torch_to_jax
from tests.bench.measure import Row, medians_us, print_table

BAR_US = 200.0
NO_BAR = float("inf")
X = torch.linspace(-1, 1, 2**20).reshape(1024, 1024)


def rows() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_sum_rows(), *_product_rows(), *_other_rows()]
    finally:
        torch.set_num_threads(threads)


def _sum_rows() -> list[Row]:
    fn, jitted, call, state, x = _bridged(lambda x: x.sum())
    plain = jax.jit(lambda x: jax.pure_callback(_sum_by_hand, jax.ShapeDtypeStruct((), jnp.float32), x))
    times = _medians(direct=lambda: fn(state[0], X), jit=lambda: jitted(state[1], x), call=lambda: call(state[1], x))
    theirs = _medians(direct=lambda: fn(state[0], X), pure_callback=lambda: plain(x))
    return [
        _overhead("sum of 4 MB, compiled, in jax.jit", "direct call", times["jit"], times["direct"], BAR_US),
        _overhead("the same, without jit", "direct call", times["call"], times["direct"], NO_BAR),
        _overhead("a plain jax.pure_callback", "direct call", theirs["pure_callback"], theirs["direct"], NO_BAR),
    ]


def _product_rows() -> list[Row]:
    fn, jitted, _, state, x = _bridged(lambda x: x * 2)
    like = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    hand = jax.jit(lambda x: buffer_callback(_double_by_hand, like)(x))
    times = _medians(direct=lambda: fn(state[0], X), jit=lambda: jitted(state[1], x), hand=lambda: hand(x))
    what = "product of 4 MB, compiled, in jax.jit"
    return [
        _overhead(what, "a callback by hand: product, copy", times["jit"], times["hand"], NO_BAR),
        _overhead(what, "direct call, which copies nothing", times["jit"], times["direct"], NO_BAR),
    ]


def _sum_by_hand(x: Any) -> Any:
    return torch.from_numpy(np.array(x)).sum().numpy()


def _double_by_hand(_: Any, out: Any, x: Any) -> None:
    torch.from_numpy(np.asarray(out)).copy_(torch.from_numpy(np.asarray(x)) * 2)


def _bridged(function: Callable[[Any], Any]) -> tuple[Any, ...]:
    """A compiled function, the same in JAX with and without jit, its state on both sides, and its argument in JAX."""
    state, fn = sf.compile(sf.init_state(), function, (X,), backend="eager")
    f = to_jax(fn)
    return fn, jax.jit(lambda state, x: f(state, x)[1]), f, (state, torch_to_jax(state)), torch_to_jax(X)


def _medians(**contestants: Callable[[], Any]) -> dict[str, float]:
    waiting = {name: (lambda run=run: jax.block_until_ready(run())) for name, run in contestants.items()}
    # One call at a time: the mean of several is at the mercy of whoever else has the cores.
    return medians_us(waiting, rounds=300)


def _other_rows() -> list[Row]:
    x, g = torch_to_jax(X), from_jax(jnp.sum)
    reference = jax.jit(jnp.sum)
    times = _medians(from_jax=lambda: g(X), jax=lambda: reference(x))
    times |= _medians(
        torch_to_jax=lambda: torch_to_jax(X), jax_to_torch=lambda: jax_to_torch(x), clone=lambda: X.clone()
    )
    return [
        _overhead("from_jax: sum of 4 MB", "JAX itself, jitted", times["from_jax"], times["jax"], NO_BAR),
        _ratio("torch_to_jax, 4 MB", "torch's clone", times["torch_to_jax"], times["clone"]),
        _ratio("jax_to_torch, 4 MB", "torch's clone", times["jax_to_torch"], times["clone"]),
    ]


def _overhead(what: str, baseline: str, ours: float, theirs: float, bar: float) -> Row:
    """A row whose ratio is the microseconds beyond the baseline."""
    return Row(f"{what}: us beyond", baseline, f"{ours:.0f} us", f"{theirs:.0f} us", ours - theirs, bar)


def _ratio(what: str, baseline: str, ours: float, theirs: float) -> Row:
    return Row(what, baseline, f"{ours:.0f} us", f"{theirs:.0f} us", ours / theirs, NO_BAR)


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
