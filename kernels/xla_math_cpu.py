"""XLA's logarithms and inverse error function for CPUs as one compiled loop; imported at the first call.

Without a C++ compiler the same comes from plain torch, many times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from scoped_fn.kernels import _xla_math as reference
from scoped_fn.kernels._opaque_op import compile_cpp
from scoped_fn.kernels.xla_math import FUNCTIONS, LOG, LOG1P

CHUNK: Final = 1 << 10
SERIAL: Final = 1 << 14  # so few are computed before other threads have woken up


def _number(value: float) -> str:
    return f"{reference.single(value)!r}f"


def _horner(x: str, coefficients: Sequence[float]) -> str:
    text = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        text = f"fused({x}, {text}, {_number(coefficient)})"
    return text


SOURCE: Final = f"""
#include <cmath>
#include <cstdint>
#include <cstring>

// Inductor's flags leave no loop to the compiler to vectorize.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float fused(float a, float b, float c) {{ return __builtin_fmaf(a, b, c); }}

INLINE float log_of(float x)
{{
    uint32_t pattern;
    memcpy(&pattern, &x, 4);
    float exponent = float(int32_t(pattern >> 23) - 126), m;
    pattern = (pattern & 0x7FFFFF) | 0x3F000000;
    memcpy(&m, &pattern, 4);
    const bool small = m < {_number(reference.SQRT_HALF)};
    exponent -= small ? 1.0f : 0.0f;
    m = (m - 1.0f) + (small ? m : 0.0f);
    const float square = m * m, cube = square * m;
    const float first = {_horner("m", reference.LOG[0])};
    const float second = {_horner("m", reference.LOG[1])};
    const float third = {_horner("m", reference.LOG[2])};
    float tail = fused(fused(first, cube, second), cube, third);
    tail = fused(tail, cube, exponent * {_number(reference.LN2_LOW)});
    const float value = fused(exponent, {_number(reference.LN2_HIGH)}, fused(square, -0.5f, m) + tail);
    return x == 0.0f ? -INFINITY : value;
}}

INLINE float log1p_of(float x)
{{
    const float square = x * x;
    const float ratio = ({_horner("x", reference.LOG1P)}) / ({_horner("x", reference.LOG1P_BELOW)});
    const float near = x + fused(square, -0.5f, x * square * ratio), far = log_of(1.0f + x);
    return fabsf(x) < {_number(reference.LOG1P_LIMIT)} ? near : far;
}}

INLINE float erf_inv_near(float x, float w)
{{
    w -= 2.5f;
    return ({_horner("w", reference.NEAR)}) * x;
}}

INLINE float erf_inv_far(float x, float w)
{{
    w = sqrtf(w) - 3.0f;
    return ({_horner("w", reference.FAR)}) * x;
}}

extern "C" void kernel(const float* x, float* y, int64_t count, int64_t function, int64_t threads)
{{
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < count; start += {CHUNK}) {{
        const int64_t end = start + {CHUNK} < count ? start + {CHUNK} : count;
        if (function == {LOG})
            for (int64_t i = start; i < end; i++) y[i] = log_of(x[i]);
        else if (function == {LOG1P})
            for (int64_t i = start; i < end; i++) y[i] = log1p_of(x[i]);
        else {{
            float w[{CHUNK}];
            for (int64_t i = start; i < end; i++) {{
                w[i - start] = -log1p_of(-x[i] * x[i]);
                y[i] = erf_inv_near(x[i], w[i - start]);
            }}
            // Few are far: a loop of its own keeps their roots out of the one above, which is vectorized.
            for (int64_t i = start; i < end; i++)
                if (!(w[i - start] < 5.0f)) y[i] = erf_inv_far(x[i], w[i - start]);
        }}
    }}
}}
"""
KERNEL: Final = compile_cpp(["const float*", "float*", *["int64_t"] * 3], SOURCE)


def xla_math(x: Tensor, function: int) -> Tensor:
    """Returns float32 of the shape of `x`, contiguous: the function of that number."""
    if KERNEL is None:
        return FUNCTIONS[function](x)
    x = x.contiguous()
    y = torch.empty_like(x)
    KERNEL(x, y, x.numel(), function, 1 if x.numel() <= SERIAL else torch.get_num_threads())
    return y
