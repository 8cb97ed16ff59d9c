"""A JAX function as a torch function under every transform, against the same function written in torch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import scoped_fn as sf
from scoped_fn.interop import from_jax, to_jax
from tests.interop.values import Pair


def jax_pair(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(x * y), (x**3).sum()


def torch_pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * y).sin(), (x**3).sum()


X, Y = torch.linspace(-1.0, 1.5, 3), torch.linspace(0.5, 2.0, 3)
XS = torch.stack([X, Y, X * Y, X - 1])
YS = torch.stack([Y, X, Y - X, Y * 2])


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    def scalar(x: Any, y: Any) -> Any:
        first, second = f(x, y)
        return (first * torch.arange(1.0, 4.0)).sum() + second

    return scalar


def backward(f: Callable[..., Any]) -> Any:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    total(f)(x, y).backward()
    return x.grad, y.grad


def double_backward(f: Callable[..., Any]) -> Any:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(f)(x, Y), x, create_graph=True)
    (first**2).sum().backward()
    return x.grad


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "call": lambda f: f(X, Y),
    "no_grad": lambda f: torch.no_grad()(f)(X, Y),
    "backward": backward,
    "double backward": double_backward,
    "grad": lambda f: grad(total(f), (0, 1))(X, Y),
    "grad of one output": lambda f: grad(lambda x: f(x, Y)[1])(X),
    "vjp": lambda f: vjp(f, X, Y)[1]((Y, torch.tensor(2.0))),
    "jvp": lambda f: jvp(f, (X, Y), (Y, X)),
    "jvp of one input": lambda f: jvp(lambda x: f(x, Y), (X,), (Y,)),
    "vmap": lambda f: vmap(f)(XS, YS),
    "vmap, in_dims": lambda f: vmap(f, (-1, None), out_dims=(-1, 0))(XS.T, Y),
    "vmap(vmap)": lambda f: vmap(vmap(f, (0, None)), (None, 0))(XS, YS),
    "vmap(grad)": lambda f: vmap(grad(total(f)), (0, None))(XS, Y),
    "grad(vmap)": lambda f: grad(lambda x: vmap(total(f), (0, None))(x, Y).sum())(XS),
    "jacrev": lambda f: jacrev(f)(X, Y),
    "jacfwd": lambda f: jacfwd(f)(X, Y),
    "hessian": lambda f: hessian(total(f))(X, Y),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(total(f)))(X, Y),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(total(f)))(X, Y),
    "third order": lambda f: grad(lambda x: grad(lambda x: grad(total(f))(x, Y).sum())(x).sum())(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_of_the_torch_function(transform: str) -> None:
    found, expected = TRANSFORMS[transform](from_jax(jax_pair)), TRANSFORMS[transform](torch_pair)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_derivatives_agree_with_differences() -> None:
    with jax.enable_x64(True):
        f = from_jax(lambda x, y: (jnp.sin(x) * y, jnp.cumsum(x)))
        inputs = (X.double().requires_grad_(), Y.double().requires_grad_())
        assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, inputs)


def test_x64_at_the_call_holds_in_its_backward() -> None:
    x = X.double().requires_grad_()
    with jax.enable_x64(True):
        out = from_jax(lambda x: jnp.sin(x).sum())(x)
    out.backward()
    torch.testing.assert_close(x.grad, X.double().cos())


def test_complex_derivatives_follow_the_convention_of_torch() -> None:
    z, w = torch.tensor([1 + 2j, 0.5 - 1j]), torch.tensor([0.3 - 1j, 1 + 0.2j])
    f, reference = from_jax(lambda z, w: jnp.exp(z * w)), lambda z, w: (z * w).exp()
    torch.testing.assert_close(vjp(f, z, w)[1](z), vjp(reference, z, w)[1](z))
    torch.testing.assert_close(jvp(f, (z, w), (w, z)), jvp(reference, (z, w), (w, z)))
    found = grad(from_jax(lambda z: (jnp.abs(z) ** 3).sum()))(z)
    torch.testing.assert_close(found, grad(lambda z: (z.abs() ** 3).sum())(z))


def several(x: jax.Array, n: jax.Array, power: Any = 2, flag: str | None = None) -> dict[str, Any]:
    return {"value": (x * n * power).sum(), "rest": [n + 1, None, 3, flag], "pair": Pair(x.argmax(), ())}


def test_arguments_and_results_of_any_kind() -> None:
    x, n, f = torch.arange(3.0, requires_grad=True), torch.arange(3), from_jax(several)
    found = f(x, n, flag="on")
    assert (found["rest"][0].tolist(), found["rest"][1:]) == ([1, 2, 3], [None, 3, "on"])
    assert found["pair"] == Pair(torch.tensor(2), ())
    assert not found["rest"][0].requires_grad
    found["value"].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 4.0]
    assert grad(lambda power: f(x.detach(), n, power=power)["value"])(torch.tensor(5.0)) == 5.0
    assert vmap(lambda n: f(x.detach(), n)["rest"][0])(torch.ones(2, 3, dtype=torch.int32)).tolist() == [[2] * 3] * 2
    _, tangents = jvp(lambda x: (f(x, n)["value"], f(x, n)["rest"][0]), (x.detach(),), (x.detach(),))
    assert tangents[0] == 10.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_floats(dtype: torch.dtype) -> None:
    square = from_jax(lambda x: (x.astype(jnp.float32) ** 2).sum())
    x = torch.arange(3.0).to(dtype)
    assert square(x) == 5.0
    slope = grad(square)(x)
    assert slope.dtype == dtype
    assert slope.float().tolist() == [0.0, 2.0, 4.0]


def test_views_go_in_and_nothing_is_shared_with_what_comes_out() -> None:
    same = from_jax(lambda x: x)
    z = torch.tensor([1 + 2j, 0.5 - 1j])
    for view in (torch.arange(6.0).view(2, 3).t()[::2], z.conj(), z.conj().imag, torch.ones(1).expand(3)):
        torch.testing.assert_close(same(view), view.resolve_conj().resolve_neg().contiguous())
    x = torch.ones(3)
    same(x).add_(1)
    assert x.tolist() == [1.0] * 3
    constant = jnp.arange(3.0)
    from_jax(lambda: constant)().add_(1)
    assert constant.tolist() == [0.0, 1.0, 2.0]


def test_functions_with_nothing_to_take_or_give() -> None:
    assert from_jax(lambda x: None)(X) is None
    assert from_jax(lambda: jnp.ones(2))().tolist() == [1.0, 1.0]
    assert from_jax(lambda x: np.ones(2, np.float32))(X).tolist() == [1.0, 1.0]
    assert from_jax(lambda x: x * 2)(torch.ones(0, 3)).shape == (0, 3)
    assert repr(from_jax(several)).startswith("from_jax(<function several")


def test_random_keys_are_words_in_torch() -> None:
    state = sf.init_state(key=3)
    draw = from_jax(lambda words: jax.random.uniform(jax.random.wrap_key_data(words), (4,)))
    assert draw(state.key).tolist() == jax.random.uniform(jax.random.key(3), (4,)).tolist()
    split = from_jax(lambda words: jax.random.split(jax.random.wrap_key_data(words)))(state.key)
    assert split.tolist() == jax.random.key_data(jax.random.split(jax.random.key(3))).tolist()
    assert sf.tree_equal(from_jax(lambda state: state)(state), state)


def test_outputs_that_a_loss_leaves_out_are_left_out_of_its_gradient() -> None:
    f = from_jax(lambda x: (jnp.sqrt(x), x * 2))
    assert grad(lambda x: f(x)[1])(torch.tensor(0.0)) == 2.0


def test_a_call_of_the_same_kind_traces_nothing_again() -> None:
    traces: list[Any] = []
    f = from_jax(lambda x: (traces.append(x.shape), x * 2)[1])
    f(X)
    count = len(traces)
    f(X + 1)
    assert len(traces) == count


def test_one_inside_the_other() -> None:
    torch.testing.assert_close(from_jax(to_jax(torch.tanh))(X), X.tanh())
    both = to_jax(from_jax(jnp.tanh))
    x = jnp.asarray(X.numpy())
    np.testing.assert_allclose(jax.jit(both)(x), jnp.tanh(x), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: both(x).sum()))(x), jax.grad(lambda x: jnp.tanh(x).sum())(x), rtol=1e-5
    )


def test_a_module_that_holds_one_can_be_copied() -> None:
    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = from_jax(jnp.tanh)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.f(x)

    torch.testing.assert_close(copy.deepcopy(Holds())(X), X.tanh())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "float64": (lambda: from_jax(lambda x: x)(X.double()), TypeError, "Expected no float64 while jax_enable_x64"),
    "int64": (lambda: from_jax(lambda x: x)(torch.tensor([2**40])), OverflowError, "values that fit int32"),
    "an array": (lambda: from_jax(lambda x: x)(jnp.ones(2)), TypeError, "got an array .*jax_to_torch"),
    "no hash": (lambda: from_jax(lambda x, y: x)(X, bytearray(b"1")), TypeError, "static values that hash"),
    "no function": (lambda: from_jax(3), TypeError, "Expected a function of arrays, got a int"),  # type: ignore[arg-type]
    "sparse": (lambda: from_jax(lambda x: x)(torch.eye(2).to_sparse()), TypeError, "layout torch.sparse_coo"),
    "its own error": (lambda: from_jax(lambda x: x + jnp.ones(5))(X), TypeError, "incompatible shapes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


def test_the_operator_is_as_torch_wants_one() -> None:
    f = from_jax(jax_pair)
    f(X, Y)
    ((call, _),) = f._calls.values()  # type: ignore[attr-defined]
    number = call.derived["number"]
    torch.library.opcheck(call.operator.overload, ([X, Y], number))
    with pytest.raises(RuntimeError, match="Expected a derivative by the rules of the function"):
        call.operator.overload([X.clone().requires_grad_(), Y], number)[0].sum().backward()


def test_a_function_has_one_operator_however_it_is_called() -> None:
    before = set(dir(torch.ops.scoped_fn_interop))
    f = from_jax(lambda x, power=2: (x**power).sum())
    for size in range(1, 5):
        x = torch.arange(1.0, 1.0 + size)
        assert f(x, power=size) == (x**size).sum()
        torch.testing.assert_close(vmap(grad(f))(x), 2 * x)
    assert len(set(dir(torch.ops.scoped_fn_interop)) - before) == 1


def test_nothing_outlives_the_function() -> None:
    f = from_jax(jax_pair)
    grad(lambda x, f=f: f(x, Y)[1])(X)
    ((call, _),) = f._calls.values()  # type: ignore[attr-defined]
    operator, number = call.operator.overload, call.derived["number"]
    watched = [weakref.ref(f), weakref.ref(call), weakref.ref(call.operator)]
    del f, call
    jax.clear_caches()  # JAX keeps what it has compiled
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3
    with pytest.raises(RuntimeError, match="Expected the function that from_jax returned to be alive"):
        operator([X, Y], number)


def test_tensors_without_values_give_results_without_values() -> None:
    f = from_jax(lambda x, y: x * 2 + y)
    for devices in (("meta", "cpu"), ("cpu", "meta"), ("meta", "meta")):
        out = f(*(torch.ones(3, device=device) for device in devices))
        assert out.is_meta
        assert out.shape == (3,)
