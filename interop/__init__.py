"""Bridges to JAX, to pytrees of other libraries and to their checkpoints.

JAX is imported inside functions only: the library works without it. Empty so far.
"""

if __name__ != "scoped_fn.interop":
    raise ImportError(
        f"Expected to be imported as 'scoped_fn.interop', got {__name__!r}. Write: import scoped_fn.interop"
    )

__all__: list[str] = []
