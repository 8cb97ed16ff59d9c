"""FP8 kernels: the reference in plain torch, the Triton ones, and their registration as torch operators.

Imports nothing else of this library, only torch and triton. Empty so far.
"""

if __name__ != "scoped_fn.kernels":
    raise ImportError(
        f"Expected to be imported as 'scoped_fn.kernels', got {__name__!r}. Write: import scoped_fn.kernels"
    )

__all__: list[str] = []
