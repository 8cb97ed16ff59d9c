"""Models that draw from the state's key around a JAX function: the numbers are those of the same model in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from scoped_fn.interop import from_jax
from tests.compose.quiet import QUIET

pytestmark = QUIET
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
XS = torch.stack([X, X.cos()])


class Noisy(nn.Module):
    """Draws before and after the function."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.dropout, self.inner = nn.Linear(8, 8, bias=False), nn.Dropout(0.3), inner
        self.linear.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(self.linear(x) + torch.rand_like(x)))


class InRegion(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def compiled(model: type[nn.Module], inner: Any, **options: Any) -> tuple[sf.CompilerState, sf.CompiledFn]:
    return sf.compile(sf.init_state(key=3), model(inner), (X,), **{"backend": "eager", **options})


def backward(fn: Any, state: Any, params: Any) -> Any:
    params = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    fn(state, params, X)[1].square().sum().backward()
    return [value.grad for value in params.values()]


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "call": lambda fn, state, params: (fn(state, params, X)[1], fn(state, params, X)[0].key),
    "backward": backward,
    "grad": lambda fn, state, params: grad(lambda p: fn(state, p, X)[1].square().sum())(params),
    "grad(grad)": lambda fn, state, params: grad(
        lambda x: grad(lambda x: fn(state, params, x)[1].square().sum())(x).cos().sum()
    )(X),
    "jvp": lambda fn, state, params: jvp(lambda x: fn(state, params, x)[1], (X,), (X.cos(),)),
    "vmap, same": lambda fn, state, params: vmap(lambda x: fn(state, params, x)[1], randomness="same")(XS),
    "vmap, different": lambda fn, state, params: sf.vmap(fn, in_dims=(None, 0), randomness="different")(
        state, params, XS
    )[1],
}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("use", USES)
def test_the_same_numbers_as_in_torch(use: str, capture: str) -> None:
    model, before = Noisy(from_jax(jnp.sin)), torch.get_rng_state()
    state, fn = sf.compile(sf.init_state(key=3), model, (X,), backend="eager", capture=capture)
    found = USES[use](fn, state, fn.params)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, USES[use](*reversed(compiled(Noisy, torch.sin)), fn.params))
    assert fn.cache_info().eager_calls == 0


@pytest.mark.parametrize("use", ["call", "backward"])
def test_with_inductor(use: str) -> None:
    state, fn = compiled(Noisy, from_jax(jnp.sin), backend="inductor")
    torch.testing.assert_close(
        USES[use](fn, state, fn.params), USES[use](*reversed(compiled(Noisy, torch.sin)), fn.params)
    )


@pytest.mark.parametrize("use", ["call", "backward", "grad"])
def test_in_a_checkpoint_region(use: str) -> None:
    state, fn = compiled(InRegion, from_jax(jnp.sin))
    torch.testing.assert_close(
        USES[use](fn, state, fn.params), USES[use](*reversed(compiled(Noisy, torch.sin)), fn.params)
    )


def test_draws_in_evaluation_and_with_torchs_generator() -> None:
    state, fn = compiled(Noisy, from_jax(jnp.sin), rng="torch")
    assert not torch.equal(fn(state, fn.params, X)[1], fn(state, fn.params, X)[1])
    model = Noisy(from_jax(jnp.sin)).eval()
    state, fn = sf.compile(sf.init_state(key=3), lambda x: model.dropout(model.inner(x)), (X,), backend="eager")
    after, out = fn(state, X)
    assert torch.equal(after.key, state.key)
    torch.testing.assert_close(out, X.sin())
