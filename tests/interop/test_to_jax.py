"""A torch function as a JAX function under every transform, against the same function written in JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

import scoped_fn as sf
from scoped_fn.interop import to_jax, torch_to_jax


@pytest.fixture(autouse=True)
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def torch_pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * y).sin(), (x**3).sum()


def jax_pair(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(x * y), (x**3).sum()


def compiled_pair() -> Callable[..., Any]:
    """The pair as a compiled function, with its state bound."""
    example = torch.ones(3, dtype=torch.float64)
    state, fn = sf.compile(sf.init_state(), torch_pair, (example, example), backend="eager")
    arrays, f = torch_to_jax(state), to_jax(fn)
    return lambda x, y: f(arrays, x, y)[1]


BUILDS = {"plain": lambda: to_jax(torch_pair), "compiled": compiled_pair}
X = np.linspace(-1.0, 1.5, 3)
Y = np.linspace(0.5, 2.0, 3)
XS, YS = np.stack([X, Y, X * Y, X - 1]), np.stack([Y, X, Y - X, Y * 2])


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    def scalar(x: Any, y: Any) -> Any:
        first, second = f(x, y)
        return (first * jnp.arange(1.0, 4.0)).sum() + second

    return scalar


def scanned(f: Callable[..., Any]) -> Callable[..., Any]:
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (f(c, jnp.asarray(Y))[0], f(c, jnp.asarray(Y))[1]), x, None, length=3)

    return loop


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "call": lambda f: f(X, Y),
    "jit": lambda f: jax.jit(f)(X, Y),
    "grad": lambda f: jax.grad(total(f), (0, 1))(X, Y),
    "jit(grad)": lambda f: jax.jit(jax.grad(total(f), (0, 1)))(X, Y),
    "grad(jit)": lambda f: jax.grad(jax.jit(total(f)))(X, Y),
    "grad of one output": lambda f: jax.grad(lambda x: f(x, Y)[1])(X),
    "value_and_grad": lambda f: jax.value_and_grad(total(f))(X, Y),
    "vjp": lambda f: jax.vjp(f, X, Y)[1]((jnp.asarray(Y), jnp.asarray(2.0))),
    "vmap(vjp)": lambda f: jax.vmap(jax.vjp(f, X, Y)[1])((jnp.asarray(XS), jnp.arange(4.0))),
    "jvp": lambda f: jax.jvp(f, (X, Y), (Y, X)),
    "jvp of one input": lambda f: jax.jvp(lambda x: f(x, Y), (X,), (Y,)),
    "jit(jvp)": lambda f: jax.jit(lambda: jax.jvp(f, (X, Y), (Y, X)))(),
    "linearize": lambda f: jax.linearize(lambda x: f(x, Y), X)[1](Y),
    "linear_transpose": lambda f: jax.linear_transpose(jax.linearize(lambda x: f(x, Y), X)[1], X)(
        (jnp.asarray(Y), jnp.asarray(2.0))
    ),
    "vmap": lambda f: jax.vmap(f)(XS, YS),
    "vmap, in_axes": lambda f: jax.vmap(f, (0, None))(XS, Y),
    "vmap, negative axes": lambda f: jax.vmap(f, (-1, None), out_axes=(-1, 0))(XS.T, Y),
    "vmap(vmap)": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(XS, YS),
    "vmap(jit)": lambda f: jax.vmap(jax.jit(f), (0, None))(XS, Y),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(total(f)), (0, None))(XS, Y),
    "jit(vmap(grad))": lambda f: jax.jit(jax.vmap(jax.grad(total(f), (0, 1)), (None, 0)))(X, YS),
    "grad(vmap)": lambda f: jax.grad(lambda x, y: jax.vmap(total(f), (0, None))(x, y).sum(), (0, 1))(XS, Y),
    "jvp(vmap)": lambda f: jax.jvp(lambda x: jax.vmap(f, (0, None))(x, Y), (XS,), (YS,)),
    "hessian": lambda f: jax.hessian(total(f))(X, Y),
    "jit(hessian)": lambda f: jax.jit(jax.hessian(total(f), (0, 1)))(X, Y),
    "jacfwd(jacfwd)": lambda f: jax.jacfwd(jax.jacfwd(total(f)))(X, Y),
    "jacrev(jacfwd)": lambda f: jax.jacrev(jax.jacfwd(total(f)))(X, Y),
    "jacrev(jacrev)": lambda f: jax.jacrev(jax.jacrev(total(f)))(X, Y),
    "grad(grad)": lambda f: jax.grad(lambda x: jax.grad(total(f))(x, Y).sum())(X),
    "third order": lambda f: jax.grad(lambda x: jax.hessian(total(f))(x, Y).sum())(X),
    "scan": lambda f: scanned(f)(jnp.asarray(X)),
    "jit(scan)": lambda f: jax.jit(scanned(f))(X),
    "grad(scan)": lambda f: jax.grad(lambda x: scanned(f)(x)[1].sum())(X),
    "vmap(scan)": lambda f: jax.vmap(scanned(f))(jnp.asarray(XS)),
    "jvp(scan)": lambda f: jax.jvp(scanned(f), (jnp.asarray(X),), (jnp.asarray(Y),)),
    "hessian(scan)": lambda f: jax.hessian(lambda x: scanned(f)(x)[1].sum())(X),
    "cond": lambda f: jax.jit(lambda p: jax.lax.cond(p, lambda: f(X, Y), lambda: f(Y, X)))(True),
    "grad(cond)": lambda f: jax.grad(
        lambda x: jax.lax.cond(x[2] > 0, lambda x: total(f)(x, Y), lambda x: total(f)(Y, x), x)
    )(X),
    "vmap(cond)": lambda f: jax.vmap(
        lambda x: jax.lax.cond(x[1] > 0.5, lambda x: f(x, jnp.asarray(Y)), lambda x: f(jnp.asarray(Y), x), x)
    )(jnp.asarray(XS)),
    "while_loop": lambda f: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1], jnp.asarray(Y))[0]), (0, jnp.asarray(X))
    ),
    "grad(fori_loop)": lambda f: jax.grad(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: f(c, jnp.asarray(Y))[0], x).sum()
    )(X),
    "map": lambda f: jax.lax.map(lambda x: f(x, Y), XS),
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(total(f)))(X, Y),
    "jit(grad(checkpoint))": lambda f: jax.jit(jax.grad(jax.checkpoint(total(f))))(X, Y),
    "hessian(checkpoint)": lambda f: jax.hessian(jax.checkpoint(total(f)))(X, Y),
    "grad(scan(checkpoint))": lambda f: jax.jit(
        jax.grad(
            lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c, Y)[0], f(c, Y)[1])), x, None, length=3)[1].sum()
        )
    )(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("build", BUILDS)
def test_a_transform_gives_what_it_gives_of_the_jax_function(build: str, transform: str) -> None:
    found, expected = TRANSFORMS[transform](BUILDS[build]()), TRANSFORMS[transform](jax_pair)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def compiled_layer_norm(x: np.ndarray) -> Callable[..., Any]:
    """Compiled, since torch's own rules for the fused norm are wrong for tangents of tangents (2.13)."""
    state, fn = sf.compile(
        sf.init_state(), lambda x: torch.nn.functional.layer_norm(x, (3,)), (torch.from_numpy(x),), backend="eager"
    )
    arrays, f = torch_to_jax(state), to_jax(fn)
    return lambda x: f(arrays, x)[1]


SQUARE = np.array([[2.0, 0.3], [0.3, 1.5]])
FUNCTIONS = {
    "softmax": (to_jax(lambda x: torch.softmax(x, -1)), (XS,)),
    "linear": (to_jax(torch.nn.functional.linear), (XS, YS, np.arange(4.0))),
    "inverse, which has to be given no zeros": (to_jax(torch.linalg.inv), (SQUARE,)),
    "cholesky": (to_jax(lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(2, dtype=a.dtype))), (SQUARE,)),
    "views": (to_jax(lambda x: x.mT[::2].flip(0)), (XS,)),
    "convolution": (to_jax(torch.nn.functional.conv1d), (XS[None, :2], YS[None, :2, :2])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_agree_with_differences_in_both_modes(name: str) -> None:
    check_grads(*FUNCTIONS[name], order=2, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4)


def test_derivatives_of_a_compiled_function_agree_with_differences_in_both_modes() -> None:
    check_grads(compiled_layer_norm(XS), (XS,), order=2, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4)


def test_complex_derivatives_follow_the_convention_of_jax() -> None:
    z, w = np.array([1 + 2j, 0.5 - 1j]), np.array([0.3 - 1j, 1 + 0.2j])
    f, reference = to_jax(lambda z, w: (z * w).exp()), lambda z, w: jnp.exp(z * w)
    for one, other in zip(jax.vjp(f, z, w)[1](z + 0j), jax.vjp(reference, z, w)[1](z + 0j), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    for one, other in zip(jax.jvp(f, (z, w), (w, z)), jax.jvp(reference, (z, w), (w, z)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    found = jax.grad(to_jax(lambda z: (z.abs() ** 3).sum()))(z)
    np.testing.assert_allclose(found, jax.grad(lambda z: (jnp.abs(z) ** 3).sum())(z), rtol=1e-12)


def test_outputs_that_a_loss_leaves_out_are_left_out_of_its_gradient() -> None:
    f = to_jax(lambda x: (x.sqrt(), x * 2))
    for grad in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        assert float(grad(lambda x: f(x)[1])(0.0)) == 2.0  # zero times the slope of sqrt would be NaN
