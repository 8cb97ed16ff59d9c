"""Bridges to JAX, to pytrees of other libraries and to their checkpoints.

JAX is imported inside functions only: the library works without it.
"""

if __name__ != "scoped_fn.interop":
    raise ImportError(
        f"Expected to be imported as 'scoped_fn.interop', got {__name__!r}. Write: import scoped_fn.interop"
    )

from scoped_fn.interop.convert import jax_to_torch, torch_to_jax
from scoped_fn.interop.jax_function import to_jax
from scoped_fn.interop.register import register_jax
from scoped_fn.interop.torch_function import from_jax

__all__ = ["from_jax", "jax_to_torch", "register_jax", "to_jax", "torch_to_jax"]
