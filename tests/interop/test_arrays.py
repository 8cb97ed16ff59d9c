"""Tensors as arrays and back: every bit arrives, nothing is shared, and what cannot cross is refused in words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

import scoped_fn as sf
from scoped_fn.interop import from_jax, jax_to_torch, to_jax, torch_to_jax
from scoped_fn.interop.dtypes import SHARED
from tests.interop.values import TENSORS, bits


@given(TENSORS)
def test_every_bit_arrives_and_comes_back(tensor: torch.Tensor) -> None:
    with jax.enable_x64(True):
        array = torch_to_jax(tensor)
        back = jax_to_torch(array)
    assert isinstance(array, jax.Array)
    assert bits(array) == bits(tensor)
    assert bits(back) == bits(tensor)
    assert back.dtype == tensor.dtype
    assert not back.requires_grad


def test_all_dtypes_of_both_are_known() -> None:
    both = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    both = {name for name in both if hasattr(jnp, name)}
    # torch has no operations on its integers of 1, 2 and 4 bits.
    assert both - {f"{sign}int{size}" for sign in ("", "u") for size in (1, 2, 4)} == set(SHARED)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int32", "bool"])
def test_neither_side_sees_a_later_change_of_the_other(name: str) -> None:
    tensor = torch.ones(64).to(getattr(torch, name))
    array = torch_to_jax(tensor)
    tensor.zero_()
    assert np.asarray(array).astype(np.float32).tolist() == [1.0] * 64
    other = jax_to_torch(array)
    other.zero_()
    assert np.asarray(array).astype(np.float32).tolist() == [1.0] * 64
    host = np.ones(3, np.float32)
    from_host = jax_to_torch(host)
    host[:] = 0
    assert from_host.tolist() == [1.0] * 3


def test_a_typed_key_crosses_as_its_words() -> None:
    assert torch.equal(jax_to_torch(jax.random.key(7)), sf.init_state(key=7).key)
    assert jax_to_torch(jax.random.split(jax.random.key(7), 3)).shape == (3, 2)
    words = torch_to_jax(sf.init_state(key=7).key)
    assert jnp.array_equal(jax.random.uniform(jax.random.wrap_key_data(words)), jax.random.uniform(jax.random.key(7)))


@pytest.mark.parametrize(("dtype", "values"), [("int64", [-(2**31), 2**31 - 1]), ("uint64", [0, 2**32 - 1])])
def test_with_x64_off_integers_that_fit_are_narrowed(dtype: str, values: list[int]) -> None:
    array = torch_to_jax(torch.tensor(values, dtype=getattr(torch, dtype)))
    assert str(array.dtype) == dtype.replace("64", "32")
    assert array.tolist() == values
    assert torch_to_jax(torch.empty(0, dtype=torch.int64)).dtype == jnp.int32


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**32), ("int64", 2**40), ("uint64", 2**64 - 1)],
)
def test_with_x64_off_integers_that_do_not_fit_are_refused(dtype: str, value: int) -> None:
    with pytest.raises(OverflowError, match=f"Expected {dtype} values that fit .*{value}.* Set jax_enable_x64"):
        torch_to_jax(torch.tensor([value], dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_with_x64_off_wide_floats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"Expected no \w+ while jax_enable_x64 is off, got one. Set jax_enable_x64"):
        torch_to_jax(torch.ones(2, dtype=dtype))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


class _Subclass(torch.Tensor): ...


REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo. Call .to_dense"),
    "meta": (lambda: torch.ones(2, device="meta"), "no values"),
    "fake": (_fake, "a FakeTensor"),
    "subclass": (lambda: torch.ones(2).as_subclass(_Subclass), "a _Subclass"),
    "a dtype of torch only": (lambda: torch.empty(2, dtype=torch.bits8), "a dtype that torch and JAX share"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strange_tensors_are_refused(name: str) -> None:
    build, text = REFUSED[name]
    with pytest.raises(TypeError, match=f"Expected .*{text}"):
        torch_to_jax(build())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a quantized tensor .*dequantize"):
        torch_to_jax(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_a_tensor_inside_a_transform_is_refused(transform: Any) -> None:
    with pytest.raises(TypeError, match=r"inside a torch.func transform.*from_jax"):
        transform(lambda x: (torch_to_jax(x), x.sum())[1])(torch.ones(2))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_tracer_is_refused(transform: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected an array with values.*to_jax"):
        transform(jax_to_torch)(jnp.ones(2) if transform is not jax.grad else 1.0 * jnp.ones(()))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_a_key_that_is_not_threefrys_is_refused(impl: str) -> None:
    words = to_jax(lambda key: key.to(torch.int64))
    of_jax = from_jax(lambda: jax.random.key(7, impl=impl))
    for cross in (jax_to_torch, words, jax.jit(words), lambda key: of_jax()):
        with pytest.raises(TypeError, match=r"Expected a threefry key, got one of .*rbg.*\. Make it with"):
            cross(jax.random.key(7, impl=impl))


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    for cross in (jax_to_torch, to_jax(lambda x: x * 2)):
        with pytest.raises(TypeError, match=r"Expected an array without a mask, got a masked one. Call .filled"):
            cross({"a": masked})


def test_strange_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="a dtype that torch and JAX share, got int4"):
        jax_to_torch(jnp.ones(2, jnp.int4))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match="deleted"):
        jax_to_torch(gone)
