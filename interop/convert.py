"""Trees of tensors as trees of JAX arrays, and back."""

from __future__ import annotations

from typing import Any

import torch

from scoped_fn.interop.arrays import array_to_tensor, tensor_to_array, x64_enabled
from scoped_fn.interop.pytrees import counters_widened, flatten, tree_map_arrays, unflatten
from scoped_fn.interop.register import register_jax


def torch_to_jax(tree: Any) -> Any:
    """Returns a tree with JAX arrays in place of its tensors.

    The arrays are copies of the values: JAX takes an array for immutable, and a tensor is not. Tensors that require a
    gradient are detached. Numbers, strings, `None` and arrays stay as they are.

    Args:
        tree: Tensors of any shape and strides on the CPU, in containers that optree, JAX or torch know. Any dtype that
            both libraries have: bool, integers, float16 to float64, bfloat16, FP8, complex64 and complex128. With
            `jax_enable_x64` off, 64-bit integers become 32-bit ones if they fit.

    Returns:
        The same structure. A `CompilerState` too: its key is a uint32 array of shape [2], as
        `jax.random.wrap_key_data` takes it, and from then on JAX knows states as by `register_jax`.

    Raises:
        TypeError: A tensor is sparse, quantized, fake, of a subclass, on another device, inside a `torch.func`
            transform, or of a dtype that JAX has not; float64 or complex128 with x64 off.
        OverflowError: An integer does not fit 32 bits while x64 is off.

    Example:
        >>> torch_to_jax({"a": torch.arange(4.0).reshape(2, 2).t(), "b": None})
        {'a': Array([[0., 2.],
               [1., 3.]], dtype=float32), 'b': None}
    """
    register_jax()
    return tree_map_arrays(tensor_to_array, tree, is_tensor)


def jax_to_torch(tree: Any) -> Any:
    """Returns a tree with tensors in place of its JAX and NumPy arrays.

    The tensors are copies on the CPU: an operation in place on one changes no array. A typed random key becomes its
    uint32 words. Numbers, strings, `None` and tensors stay as they are.

    Args:
        tree: Arrays of any shape with a dtype that both libraries have, in containers that optree, JAX or torch know.

    Returns:
        The same structure. With `jax_enable_x64` off, int32 buffers of a `CompilerState` become int64, as torch's
        counters are.

    Raises:
        TypeError: An array is a tracer, of a dtype that torch has not, masked, or a random key that is not
            threefry's.
        ValueError: An array is spread over several devices, or was deleted.

    Example:
        >>> import jax
        >>> jax_to_torch({"key": jax.random.key(7), "n": 3})
        {'key': tensor([0, 7], dtype=torch.uint32), 'n': 3}
    """
    arrays, structure = flatten(tree, is_array)
    tensors = [array_to_tensor(array) for array in arrays]
    return unflatten(structure, tensors if x64_enabled() else counters_widened(structure, tensors))


def is_tensor(leaf: Any) -> bool:
    """Returns whether a leaf is a tensor."""
    return isinstance(leaf, torch.Tensor)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of JAX, with or without values, or of NumPy."""
    import jax
    import numpy as np

    return isinstance(leaf, (jax.Array, np.ndarray))
