"""Arguments and results of `to_jax`: integers, static values, structures, keys, narrow floats; what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from scoped_fn.interop import to_jax, torch_to_jax
from tests.interop.values import Pair

X, N = jnp.arange(3.0), jnp.arange(3)


def several(x: torch.Tensor, n: torch.Tensor, power: Any = 2, flag: str | None = None) -> dict[str, Any]:
    return {"value": (x * n * power).sum(), "rest": [n + 1, None, 3, flag], "pair": Pair(x.argmax(), ())}


def test_results_have_any_structure() -> None:
    found = to_jax(several)(X, N, flag="on")
    assert float(found["value"]) == 10.0
    assert found["rest"][0].tolist() == [1, 2, 3]
    assert found["rest"][1:] == [None, 3, "on"]
    assert isinstance(found["pair"], Pair)
    assert found["pair"].first.dtype == jnp.int32
    assert found["pair"].second == ()


def test_integers_have_no_gradient() -> None:
    f = to_jax(several)
    for transform in (lambda f: f, jax.jit):
        of_x, of_n = transform(jax.grad(lambda x, n: f(x, n)["value"], (0, 1), allow_int=True))(X, N)
        assert of_x.tolist() == [0.0, 2.0, 4.0]
        assert of_n.dtype == jax.dtypes.float0
    _, (of_value, of_rest) = jax.jvp(lambda x: (f(x, N)["value"], f(x, N)["rest"][0]), (X,), (X,))
    assert float(of_value) == 10.0
    assert of_rest.dtype == jax.dtypes.float0
    _, pull = jax.vjp(lambda x: (f(x, N)["value"], f(x, N)["rest"][0]), X)
    assert pull((1.0, np.zeros(3, jax.dtypes.float0)))[0].tolist() == [0.0, 2.0, 4.0]
    (value, aux), grad = jax.value_and_grad(lambda x: (f(x, N)["value"], f(x, N)["rest"][0]), has_aux=True)(X)
    assert (float(value), aux.tolist(), grad.tolist()) == (10.0, [1, 2, 3], [0.0, 2.0, 4.0])


def test_keyword_arguments_are_arrays_or_static() -> None:
    f = to_jax(several)
    assert float(jax.jit(lambda x: f(x, N, power=5, flag=None)["value"])(X)) == 25.0
    assert float(jax.jit(lambda p: f(X, N, power=p)["value"])(jnp.float32(5))) == 25.0
    assert float(jax.grad(lambda p: f(X, n=N, power=p)["value"])(5.0)) == 5.0


def test_static_arguments_of_another_value_or_type_are_another_function() -> None:
    seen: list[Any] = []
    f = to_jax(lambda x, how: (seen.append(how), x * 1)[1])
    for how in (1, 1.0, True, "1", 1, 1.0, True, "1"):
        f(X, how)
        assert type(seen[-1]) is type(how)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_go_in_and_come_out(name: str) -> None:
    x = X.astype(name)
    square = to_jax(lambda x: (x.to(torch.float32) ** 2).sum())
    assert float(jax.jit(square)(x)) == 5.0
    grad = jax.jit(jax.grad(square))(x)
    assert (str(grad.dtype), grad.astype(jnp.float32).tolist()) == (name, [0.0, 2.0, 4.0])
    narrow = to_jax(lambda x: x.to(getattr(torch, name)))
    assert str(jax.vmap(narrow)(jnp.ones((2, 3))).dtype) == name
    assert narrow(X).astype(jnp.float32).tolist() == [0.0, 1.0, 2.0]


def test_a_typed_key_is_its_words() -> None:
    key, words = jax.random.key(7), to_jax(lambda key: key)
    assert words(key).tolist() == [0, 7]
    assert jnp.array_equal(jax.vmap(words)(jax.random.split(key, 3)), jax.random.key_data(jax.random.split(key, 3)))
    assert float(jax.grad(to_jax(lambda x, key: x * key[1].float()))(2.0, key)) == 7.0


def test_a_function_that_writes_into_its_argument_changes_no_array() -> None:
    f = to_jax(lambda x: x.add_(1))
    for call in (f, jax.jit(f)):
        assert call(X).tolist() == [1.0, 2.0, 3.0]
    assert X.tolist() == [0.0, 1.0, 2.0]


def test_functions_with_nothing_to_take_or_give() -> None:
    assert to_jax(lambda x: None)(X) is None
    assert jax.jit(to_jax(lambda: torch.ones(2)))().tolist() == [1.0, 1.0]
    assert to_jax(lambda x: x)(X).tolist() == X.tolist()
    assert jax.vmap(to_jax(lambda x: x * 2))(jnp.ones((0, 3))).shape == (0, 3)
    assert jax.jit(to_jax(lambda x: (x * 2, x[:0])))(X)[1].shape == (0,)
    assert repr(to_jax(several)).startswith("to_jax(<function several")


def test_numpy_arrays_are_arrays() -> None:
    assert to_jax(lambda x: x * 2)(np.ones(2, np.float32)).tolist() == [2.0, 2.0]


def test_with_x64_integers_have_64_bits() -> None:
    with jax.enable_x64(True):
        found = to_jax(lambda x: x.long() * 2**40)(jnp.arange(3.0))
    assert found.dtype == jnp.int64
    assert found.tolist() == [0, 2**40, 2**41]


def test_a_call_of_the_same_kind_traces_nothing_again() -> None:
    calls: list[tuple[int, ...]] = []
    f = jax.jit(to_jax(lambda x: (calls.append(x.shape), x * 2)[1]))
    for _ in range(3):
        f(X)
    assert len(calls) == 4  # once to learn the shapes
    f(jnp.ones(4))
    assert calls[4:] == [(4,), (4,)]


def _on_values(x: torch.Tensor) -> Any:
    return x[x > 1]


AT_THE_CALL: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "float64 out": (lambda: to_jax(lambda x: x.double())(X), TypeError, "Expected no float64 while jax_enable_x64"),
    "float64 in": (lambda: to_jax(lambda x: x)(np.ones(2)), TypeError, "Expected no float64 while jax_enable_x64"),
    "a tensor": (lambda: to_jax(lambda x: x)(torch.ones(2)), TypeError, "got a torch.Tensor.*torch_to_jax"),
    "no hash": (lambda: to_jax(lambda x, y: x)(X, bytearray(b"1")), TypeError, "static values that hash.*'bytearray'"),
    "no function": (lambda: to_jax(3), TypeError, "Expected a function of tensors, got a int"),  # type: ignore[arg-type]
    "int4": (lambda: to_jax(lambda x: x)(jnp.ones(2, jnp.int4)), TypeError, "a dtype that torch and JAX share"),
    "its own error": (lambda: to_jax(lambda x: x @ x[:2])(X), RuntimeError, "size"),
}
AT_RUN_TIME: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "another shape": (lambda x: (x, _on_values(x)), r"Expected an output of shape \[0\] .* got \[1\]"),
    "another shape alone": (_on_values, r"Expected an output of shape \[0\] .* got \[1\]"),
    "another dtype": (lambda x: x if x.sum() == 4 else x.int(), r"got \[4\] and torch.int32"),
    "another number": (lambda x: (x, float(x.sum())), "Expected a result like the one when the function was traced"),
    "another structure": (lambda x: [x] * int(x.sum()), "Expected a result like the one"),
    "does not fit": (lambda x: x.long() * 2**31, "OverflowError: Expected outputs that fit int32"),
    "its own error": (lambda x: x / 0 if x.sum() == 4 else _fail(), "ValueError: my own error"),
}


def _fail() -> torch.Tensor:
    raise ValueError("my own error")


@pytest.mark.parametrize("name", AT_THE_CALL)
def test_what_is_refused_at_the_call(name: str) -> None:
    call, kind, text = AT_THE_CALL[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("name", AT_RUN_TIME)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["call", "jit"])
def test_what_is_not_as_it_was_when_traced_fails_at_run_time(name: str, transform: Any) -> None:
    function, text = AT_RUN_TIME[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(transform(to_jax(function))(jnp.array([1.0, 2.0, 1.0, 1.0])))


def test_an_error_of_the_first_run_says_what_it_was_run_with() -> None:
    with pytest.raises(ValueError, match="my own error") as caught:
        to_jax(lambda x: _fail())(X)
    assert "to_jax called the function with ones" in caught.value.__notes__[0]


def test_the_process_is_as_it_was_after_an_error() -> None:
    f = jax.jit(to_jax(lambda x: (x, _on_values(x))))
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(f(X))
    assert torch.is_grad_enabled()
    assert jax.block_until_ready(f(X - 2))[1].shape == (0,)


def test_a_tensor_that_requires_a_gradient_is_detached() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert torch_to_jax(weight).tolist() == [1.0] * 3
    f = to_jax(lambda x: (weight * x).sum())
    assert jax.grad(f)(X).tolist() == [1.0] * 3
    assert weight.grad is None


def test_nothing_outlives_the_function() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f = to_jax(double)
    jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(X)
    jax.hessian(lambda x, f=f: f(x).sum())(X)
    watched = [weakref.ref(f), weakref.ref(double)]
    del f, double
    jax.clear_caches()  # JAX keeps what it has compiled
    gc.collect()
    assert [reference() for reference in watched] == [None] * 2
