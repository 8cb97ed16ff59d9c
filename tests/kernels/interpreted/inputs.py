"""What the tests of kernels draw from: shapes, strides, and numbers that are easy to get wrong."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-42, 1e-38, 3e38, -3e38, 448.0, 464.0, 57344.0)
# The last ties and what lies beside them: 448 and 2^-9, 57344 and 2^-16 are the limits of the two formats.
SPECIAL += (463.9, 465.0, 61440.0, 61439.0, 2.0**-10, 2.0**-10 * 1.001, 1.5 * 2.0**-9, 2.0**-17, 1.5 * 2.0**-16)

batches = st.sampled_from((1, 1, 2, 3, 0))
sizes = st.sampled_from((0, 1, 2, 16, 31, 33, 64, 100, 128, 129, 257))
fp8_dtypes = st.sampled_from((E4M3, E5M2))
float_dtypes = st.sampled_from((torch.bfloat16, torch.float32, torch.float16))
arrangements = st.sampled_from(("contiguous", "transposed", "rows apart", "columns apart", "one batch"))
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from((1.0, 37.0, 0.013, 1e-30, 1e30, 3e38))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, special: bool = True) -> Tensor:
    """Normal numbers of sizes from 2^-12 to 2^12, one in 50 of them special."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    if special:
        chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.02, chosen, x)
    return x.to(dtype)


def arranged(x: Tensor, how: str) -> Tensor:
    """The same numbers with other strides; what lies between them in memory is NaN."""
    batch, m, k = x.shape
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "rows apart":
        return placed(x, (batch, 2 * m + 1, k + 5), (slice(None), slice(1, None, 2), slice(3, 3 + k)))
    if how == "columns apart":
        return placed(x, (batch, m, 3 * k + 2), (slice(None), slice(None), slice(2, None, 3)))
    if how == "one batch":
        return x[:1].expand(batch, m, k) if batch else x
    return x.contiguous()


def placed(x: Tensor, shape: tuple[int, ...], where: tuple[slice, ...]) -> Tensor:
    # 0x7F is NaN in E4M3 and in E5M2; twice or more of it is a NaN or a huge number in the others.
    buffer = torch.full((torch.Size(shape).numel() * x.itemsize,), 0x7F, dtype=torch.uint8).view(x.dtype).view(shape)
    buffer[where] = x
    return buffer[where]
