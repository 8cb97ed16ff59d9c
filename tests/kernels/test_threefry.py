"""The operators of random bits on a CPU: against JAX, without a compiler, on any number of threads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import fold_keys, random_bits, random_keep, threefry_cpu

WORDS = st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2)
SIZES = (0, 1, 15, 16, 511, 512, 513, 16385)


def key_of(words: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32)


def jax_key(words: tuple[int, int]) -> jax.Array:
    return jax.random.wrap_key_data(np.array(words, dtype=np.int64).astype(np.uint32))


@given(WORDS, st.sampled_from(SIZES))
def test_bits_are_those_of_jax(words: tuple[int, int], size: int) -> None:
    ours = random_bits(key_of(words), (size,)).numpy().view(np.uint32)
    assert np.array_equal(ours, np.asarray(jax.random.bits(jax_key(words), (size,))))


@given(WORDS, st.sampled_from(SIZES), st.integers(0, 2**23))
def test_a_mask_says_whether_the_upper_bits_are_below_the_bound(words: tuple[int, int], size: int, bound: int) -> None:
    bits = random_bits(key_of(words), (size,))
    assert torch.equal(random_keep(key_of(words), (size,), bound), ((bits >> 9) & 0x7FFFFF) < bound)


@given(WORDS, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_keys_are_those_of_jax(words: tuple[int, int], data: list[int]) -> None:
    ours = fold_keys(key_of(words), torch.tensor(data, dtype=torch.int32)).numpy().view(np.uint32)
    numbers = np.array(data, dtype=np.int64).astype(np.uint32)
    theirs = [jax.random.key_data(jax.random.fold_in(jax_key(words), number)) for number in numbers]
    assert np.array_equal(ours, np.array(theirs, dtype=np.uint32).reshape(-1, 2))


@pytest.mark.parametrize("size", SIZES)
def test_without_a_compiler_the_numbers_are_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.tensor([[0, 7], [-3, 5]], dtype=torch.int32)
    data = torch.arange(2 * size, dtype=torch.int32).reshape(2, size)

    def every() -> list[torch.Tensor]:
        return [
            threefry_cpu.random_bits(keys, [size]),
            threefry_cpu.random_keep(keys, [size], 2**21),
            threefry_cpu.fold_keys(keys, data),
        ]

    assert threefry_cpu.KERNEL is not None
    compiled = every()
    monkeypatch.setattr(threefry_cpu, "KERNEL", None)
    assert all(map(torch.equal, compiled, every()))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    key, before = torch.tensor([1, 2], dtype=torch.int32), torch.get_num_threads()
    expected = random_bits(key, (100_000,)), random_keep(key, (100_000,), 12345)
    torch.set_num_threads(threads)
    try:
        found = random_bits(key, (100_000,)), random_keep(key, (100_000,), 12345)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("layout", ["a column", "every other"])
def test_keys_may_lie_anyhow(layout: str) -> None:
    keys = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    given = keys.t().contiguous().t() if layout == "a column" else torch.stack([keys, keys], 1)[:, 0]
    assert not given.is_contiguous()
    assert torch.equal(
        torch.vmap(lambda k: random_bits(k, (5,)))(given), torch.stack([random_bits(k, (5,)) for k in keys])
    )


@pytest.mark.parametrize("shape", [(-1,), (2**16, 2**15)])
def test_too_many_numbers_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"Expected a shape of fewer than 2\*\*31 numbers to draw, got .*Split the key"
    ):
        random_bits(torch.tensor([0, 0], dtype=torch.int32), shape)


def test_words_of_another_dtype_are_refused() -> None:
    key = torch.tensor([0, 7])
    with pytest.raises(ValueError, match=r"Expected the words of a key as int32 \(2,\), got torch.int64 \[2\]"):
        random_bits(key, (4,))
    with pytest.raises(ValueError, match=r"Expected int32 numbers \(n,\), got torch.int64 \[1\]"):
        fold_keys(key.to(torch.int32), torch.tensor([1]))
