"""Inputs for the tests of kernels: every dtype, shape, layout and kind of value."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

from tests.kernels import numpy_oracle as oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMATS = {torch.float8_e4m3fn: oracle.E4M3, torch.float8_e5m2: oracle.E5M2}
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset")
KINDS = ("normal", "bits", "finite bits", "zeros", "tiny", "huge", "ties", "rows apart")
FINITE_KINDS = tuple(kind for kind in KINDS if kind != "bits")
# Around the blocks of 16, 32 and 128, and the edges.
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 127, 128, 129, 130, 257)

SEEDS = st.integers(0, 2**32 - 1)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Every bit pattern of the dtype is as likely as another: subnormals, NaN and infinities among them."""
    integers = np.dtype(np.int32 if dtype == torch.float32 else np.int16)
    information = np.iinfo(integers)
    bits = rng.integers(information.min, information.max, shape, dtype=integers, endpoint=True)
    return torch.from_numpy(np.asarray(bits)).view(dtype)


def every_bfloat16() -> torch.Tensor:
    """All 65,536 of them, (256, 256)."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(256, 256)


def tie_values() -> np.ndarray:
    """The float32 values at, just below and just above each rounding boundary of both formats, of either sign."""
    grids = [fmt.magnitudes() for fmt in (oracle.E4M3, oracle.E5M2)]
    midpoints = np.concatenate([(grid[:-1] + grid[1:]) / 2 for grid in grids] + grids).astype(np.float32)
    near = [midpoints, np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(np.inf))]
    return np.concatenate([*near, *(-one for one in near)])


def values(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """A contiguous tensor of one of the KINDS."""
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return any_bits(shape, dtype, rng)
    if kind == "finite bits":
        x = any_bits(shape, dtype, rng)
        return torch.where(x.isfinite(), x, torch.ones_like(x))
    largest = torch.finfo(dtype).max
    normal = rng.standard_normal(shape)
    table = {
        "normal": lambda: normal * 10.0 ** rng.integers(-3, 4),
        "zeros": lambda: np.copysign(0.0, normal),
        "tiny": lambda: normal * torch.finfo(dtype).tiny / 4,
        "huge": lambda: np.clip(normal, -1, 1) * largest,
        "ties": lambda: rng.choice(tie_values(), shape),
        "rows apart": lambda: normal * 10.0 ** rng.integers(-8, 3, (*shape[:-1], 1) if shape else ()),
    }
    wide = np.clip(np.asarray(table[kind](), np.float64), -largest, largest).astype(np.float32)
    return torch.from_numpy(np.asarray(wide)).to(dtype).clamp(-largest, largest)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides; "expanded" repeats the first of the last dimension or the one before."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and x.dim() > 0:
        wide = torch.full((*(2 * size for size in x.shape[:-1]), 3 * x.shape[-1] + 1), math.nan, dtype=x.dtype)
        view = wide[(*(slice(None, None, 2) for _ in x.shape[:-1]), slice(1, None, 3))]
        return view.copy_(x)
    if layout == "expanded" and x.numel():
        axis = x.dim() - 2 if x.dim() > 1 else -1
        return x.narrow(axis, 0, 1).expand(x.shape) if x.dim() else x
    if layout == "offset":
        return torch.cat([torch.full((5,), math.nan, dtype=x.dtype), x.flatten()])[5:].view(x.shape)
    return x


@st.composite
def shapes(draw: st.DrawFn, *, sizes: tuple[int, ...] = SIZES, min_dims: int = 0) -> tuple[int, ...]:
    """From no dimension to four; only the last two are large."""
    dims = draw(st.integers(min_dims, 4))
    last = [draw(st.sampled_from(sizes)) for _ in range(min(dims, 2))]
    return (*(draw(st.integers(0, 3)) for _ in range(dims - 2)), *last)


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    kinds: tuple[str, ...] = KINDS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    sizes: tuple[int, ...] = SIZES,
    min_dims: int = 0,
) -> torch.Tensor:
    """A tensor of any shape, dtype, kind of value and layout."""
    shape = draw(shapes(sizes=sizes, min_dims=min_dims))
    dtype, kind = draw(st.sampled_from(dtypes)), draw(st.sampled_from(kinds))
    return lay_out(values(shape, dtype, kind, draw(SEEDS)), draw(st.sampled_from(LAYOUTS)))
