"""The repaired interpreter rounds as GPUs do: by what the formats are, not by another cast."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import interpreter
from tests.kernels.interpreted.inputs import E4M3, E5M2


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty), mask=i < n)


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def finite_numbers(dtype: torch.dtype) -> np.ndarray:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return np.unique(values[values.isfinite()].numpy())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_go_to_the_nearest_number(dtype: torch.dtype) -> None:
    numbers = finite_numbers(dtype)
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = np.concatenate([np.nextafter(middles.astype(np.float32), np.float32(s * np.inf)) for s in (1, -1)])
    random = np.random.default_rng(0).normal(size=2000) * np.exp2(np.random.default_rng(1).integers(-20, 20, 2000))
    x = np.concatenate([numbers, beside, random, [1e9, -1e9, np.inf, -np.inf]]).astype(np.float32)
    got = converted(torch.from_numpy(x), dtype).double().numpy()
    nearest = numbers[np.abs(np.clip(x, numbers[0], numbers[-1])[:, None] - numbers[None, :]).argmin(1)]
    assert np.array_equal(got, nearest)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_ties_go_to_even_numbers(dtype: torch.dtype) -> None:
    numbers = finite_numbers(dtype)
    middles = torch.from_numpy((numbers[1:] + numbers[:-1]) / 2).float()
    codes = converted(middles, dtype).view(torch.uint8)
    assert (codes % 2 == 0).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.bfloat16])
def test_nan_and_the_sign_of_zero_stay(dtype: torch.dtype) -> None:
    y = converted(torch.tensor([torch.nan, -0.0, 0.0, -1e-45]), dtype).float()
    assert y[0].isnan()
    assert y.signbit().tolist()[1:] == [True, False, True]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_comes_back(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    back = converted(converted(codes, torch.float32), dtype)
    number = codes.float().isfinite()
    assert torch.equal(back.view(torch.uint8)[number], codes.view(torch.uint8)[number])
    assert torch.equal(converted(codes, torch.float32).isnan(), codes.float().isnan())


def test_bfloat16_rounds_to_even() -> None:
    x = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20, 3.4e38])
    assert converted(x, torch.bfloat16).float().tolist() == [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, torch.inf]


@pytest.mark.parametrize(("dtype", "limit", "beyond"), [(E4M3, 464.0, 465.0), (E5M2, 61408.0, 61440.0)])
def test_poor_casts(dtype: torch.dtype, limit: float, beyond: float) -> None:
    with interpreter.poor_casts():
        y = converted(torch.tensor([limit, -limit, beyond, -beyond]), dtype).float()
    assert y[:2].isfinite().all()
    assert not y[2:].isfinite().any()


def test_poor_casts_round_twice() -> None:
    above_a_tie = torch.tensor([1.0625 + 2.0**-15])
    assert converted(above_a_tie, E4M3).float().item() == 1.125
    with interpreter.poor_casts():
        assert converted(above_a_tie, E4M3).float().item() == 1.0


@triton.jit
def maximum_kernel(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.max(x))
    tl.store(y_ptr + 1 + tl.arange(0, N), tl.maximum(x, -4.0))


def test_maximum_leaves_nan_out() -> None:
    y = torch.empty(5)
    maximum_kernel[(1,)](torch.tensor([torch.nan, -3.0, torch.nan, -5.0]), y, N=4)
    assert y.tolist() == [-3.0, -4.0, -3.0, -4.0, -4.0]
    maximum_kernel[(1,)](torch.full((4,), torch.nan), y, N=4)
    assert y[0].isnan()


@triton.jit
def dot_kernel(a_ptr, b_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


MIXES = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(("dtype_a", "dtype_b"), MIXES)
def test_products_are_those_of_the_numbers(dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(dtype_a), torch.randn(16, 16).to(dtype_b)
    y = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, y, N=16)
    torch.testing.assert_close(y.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
