"""The cases about JAX from public bug reports, driven through our bridge."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest
import torch

from scoped_fn.interop import jax_to_torch, to_jax, torch_to_jax
from tests.cases.casekit import EAGER, Case, check_with
from tests.cases.open_cases import OPEN

CASES = [case for case in OPEN if case.area == "jax"]
IN_A_CHILD = "jit_callback_no_deadlock"


class Interop:
    """What the cases call."""

    @staticmethod
    def to_jax(tensor: torch.Tensor) -> jax.Array:
        return torch_to_jax(tensor)  # type: ignore[no-any-return]

    @staticmethod
    def to_torch(array: jax.Array) -> torch.Tensor:
        return jax_to_torch(array)  # type: ignore[no-any-return]

    @staticmethod
    def as_jax(fn: Any, *example: Any, **static: Any) -> Any:
        wrapped = to_jax(fn)
        return lambda *arrays: wrapped(*arrays, **static)


class Bridge:
    """A compiler as the cases want one, of which they use the bridge."""

    name = "scoped_fn bridge"
    interop = Interop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return EAGER(*args, **kwargs)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != IN_A_CHILD], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    assert check_with(case, Bridge()) == []


NESTED = """
import torch, numpy as np, jax, jax.numpy as jnp
from scoped_fn.interop import to_jax
torch.set_num_threads(2)
w = torch.linspace(-1, 1, 300 * 300).view(300, 300)
f = to_jax(lambda x: (x @ w).tanh())
step = jax.jit(lambda x: f(f(x) + 1.0) * 0.5)
x = jnp.linspace(-1, 1, 300 * 300).reshape(300, 300)
for _ in range(10):
    y = step(x); g = jax.grad(lambda z: step(z).sum())(x)   # no block_until_ready in between
both = jax.jit(jax.vmap(lambda z: step(step(z))))(jnp.stack([x, x]))
t = torch.linspace(-1, 1, 300 * 300).view(300, 300).requires_grad_()
h = lambda z: (z @ w).tanh()
r = h(h(t) + 1.0) * 0.5
r.sum().backward()
np.testing.assert_allclose(np.asarray(y), r.detach().numpy(), rtol=1e-3, atol=1e-3)
np.testing.assert_allclose(np.asarray(g), t.grad.numpy(), rtol=2e-2, atol=2e-3)
print("finished", both.shape)
"""
WITHIN = """
import torch, jax, jax.numpy as jnp
from scoped_fn.interop import from_jax, to_jax
inner = from_jax(lambda x: jnp.tanh(x @ x))
f = to_jax(lambda x: inner(x) * 2)
x = jnp.ones((500, 500))
for _ in range(5):
    y = jax.jit(lambda x: f(f(x @ x)))(x); g = jax.jit(jax.grad(lambda x: f(f(x @ x)).sum()))(x)
print("finished", y.shape, g.shape)
"""


@pytest.mark.parametrize("script", [NESTED, WITHIN], ids=["nested callbacks", "JAX inside torch inside JAX"])
def test_nothing_waits_for_itself(script: str) -> None:
    assert IN_A_CHILD in {case.name for case in CASES}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "finished" in ran.stdout, ran.stderr[-800:]
