"""Random bits, masks and keys by the Triton kernels, against the operators on a CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import threefry_cpu as reference
from scoped_fn.kernels.gpu import threefry as gpu
from tests.kernels.interpreted.guarded import guarded
from tests.kernels.interpreted.inputs import seeds

SIZES = st.sampled_from((0, 1, 7, 1023, 1024, 1025, 2500))


def words(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)


@given(st.integers(1, 3), SIZES, seeds)
def test_random_bits(rows: int, size: int, seed: int) -> None:
    keys = words(rows, seed)
    assert torch.equal(guarded(gpu.random_bits, keys, [size]), reference.random_bits(keys, [size]))


@given(st.integers(1, 3), SIZES, st.sampled_from((0, 1, 2**22, 2**23 - 1, 2**23)), seeds)
def test_random_keep(rows: int, size: int, bound: int, seed: int) -> None:
    keys = words(rows, seed)
    assert torch.equal(guarded(gpu.random_keep, keys, [size], bound), reference.random_keep(keys, [size], bound))


@given(st.integers(1, 3), SIZES, seeds)
def test_fold_keys(rows: int, size: int, seed: int) -> None:
    keys, data = words(rows, seed), words(rows * size, seed + 1).reshape(rows, -1)[:, :size].contiguous()
    assert torch.equal(guarded(gpu.fold_keys, keys, data), reference.fold_keys(keys, data))


@pytest.mark.parametrize("shape", [(), (3, 5), (2, 0, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    keys = words(2, 0)
    assert gpu.random_bits(keys, shape).shape == (2, *shape)
    assert torch.equal(gpu.random_bits(keys, shape), reference.random_bits(keys, shape))
