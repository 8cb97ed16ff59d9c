"""threefry2x32 for CPUs as one compiled loop; imported at the first draw, which compiles it once for a machine.

Without a C++ compiler the same comes from NumPy, several times slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from scoped_fn.kernels._opaque_op import compile_cpp
from scoped_fn.kernels._threefry_rounds import PARITY, ROTATIONS, threefry_numpy

BITS, KEEP, FOLD = range(3)
WIDTH, LANES = 16, 512
CHUNK: Final = 1 << 14  # uint32 numbers that stay in the caches of one core while some hundred operations run over them
ROUNDS: Final = "\n".join(
    "".join(f"high += low; low = (low << {r} | low >> {32 - r}) ^ high; " for r in ROTATIONS[i % 2])
    + f"high += k{(i + 1) % 3}; low += k{(i + 2) % 3} + {i + 1}u;"
    for i in range(5)
)
SOURCE: Final = f"""
#include <cstdint>

// Vectors of numbers by the compiler's extension: Inductor's flags leave no loop to the compiler to vectorize.
typedef uint32_t vec __attribute__((vector_size(4 * {WIDTH}), may_alias));

// The two words of {LANES} counters each.
static inline void draw(uint32_t k0, uint32_t k1, const vec* counter, vec* first, vec* second)
{{
    const uint32_t k2 = k0 ^ k1 ^ {PARITY}u;
    for (int i = 0; i < {LANES} / {WIDTH}; i++) {{
        vec low = counter[i] + k1, high = low - low + k0;
        {ROUNDS}
        first[i] = high;
        second[i] = low;
    }}
}}

extern "C" void kernel(
    const int32_t* keys, const int32_t* data, int32_t* words, bool* kept,
    int64_t rows, int64_t count, int64_t what, int64_t bound, int64_t threads)
{{
    #pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {{
        for (int64_t start = 0; start < count; start += {LANES}) {{
            const int64_t at = row * count + start;
            const int some = count - start < {LANES} ? count - start : {LANES};
            alignas(64) uint32_t counter[{LANES}], first[{LANES}], second[{LANES}];
            for (int i = 0; i < {LANES}; i++)
                counter[i] = what != {FOLD} ? uint32_t(start + i) : i < some ? uint32_t(data[at + i]) : 0u;
            draw(keys[2 * row], keys[2 * row + 1], (vec*)counter, (vec*)first, (vec*)second);
            if (what == {BITS})
                for (int i = 0; i < some; i++) words[at + i] = first[i] ^ second[i];
            else if (what == {KEEP})
                for (int i = 0; i < some; i++) kept[at + i] = (first[i] ^ second[i]) >> 9 < uint32_t(bound);
            else
                for (int i = 0; i < some; i++) {{
                    words[2 * (at + i)] = first[i];
                    words[2 * (at + i) + 1] = second[i];
                }}
        }}
    }}
}}
"""
KERNEL: Final = compile_cpp(["const int32_t*", "const int32_t*", "int32_t*", "bool*", *["int64_t"] * 5], SOURCE)


def random_bits(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns int32 (B, *shape): the exclusive or of both words of every counter."""
    bits = keys.new_empty(len(keys), math.prod(shape))
    if KERNEL is None:
        _by_numpy(keys, bits, lambda part, high, low: part.copy_(high ^ low))
    else:
        _launch(keys, keys, bits, keys, BITS)
    return bits.view(len(keys), *shape)


def random_keep(keys: Tensor, shape: Sequence[int], bound: int) -> Tensor:
    """Returns bool (B, *shape): whether the upper 23 bits are below the bound."""
    kept = keys.new_empty(len(keys), math.prod(shape), dtype=torch.bool)
    if KERNEL is None:
        _by_numpy(keys, kept, lambda part, high, low: part.copy_((((high ^ low) >> 9) & 0x7FFFFF) < bound))
    else:
        _launch(keys, keys, keys, kept, KEEP, bound)
    return kept.view(len(keys), *shape)


def fold_keys(keys: Tensor, data: Tensor) -> Tensor:
    """Returns int32 (B, n, 2): both words of the counters `data`, int32 (B, n)."""
    words = data.new_empty(*data.shape, 2)
    if KERNEL is None:
        for key, counter, row in zip(keys, data, words, strict=True):
            row.copy_(torch.stack(threefry_numpy(key, counter), -1))
    else:
        _launch(keys, data.contiguous(), words, keys, FOLD)
    return words


def _launch(keys: Tensor, data: Tensor, words: Tensor, kept: Tensor, what: int, bound: int = 0) -> None:
    """Runs the compiled loop; of `words` and `kept` it writes the one that is a result."""
    count = (kept if what == KEEP else data if what == FOLD else words).shape[1]
    threads = 1 if count <= CHUNK else torch.get_num_threads()
    KERNEL(keys.contiguous(), data, words, kept, len(keys), count, what, bound, threads)  # type: ignore[misc]


def _by_numpy(keys: Tensor, result: Tensor, write: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    for key, row in zip(keys, result, strict=True):
        for start in range(0, row.shape[0], CHUNK):
            part = row[start : start + CHUNK]
            counter = torch.arange(start, start + len(part), dtype=torch.int32)
            write(part, *threefry_numpy(key, counter))
