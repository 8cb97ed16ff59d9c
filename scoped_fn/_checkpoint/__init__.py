"""Values on disk: states, tensors and plain data in one file, without pickle."""

from scoped_fn._checkpoint.leaves import from_tensors, to_tensors
from scoped_fn._checkpoint.load import load
from scoped_fn._checkpoint.save import save

__all__ = ["from_tensors", "load", "save", "to_tensors"]
