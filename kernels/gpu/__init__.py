"""Triton kernels, one family a file, each beside its launcher.

A launcher is named like its operator and takes the operator's arguments, all with a leading batch dimension B, plus
`tile`, the launch configuration (`None`: the one that `scoped_fn.kernels._tiles` holds for these shapes). It allocates
contiguous outputs, launches once for the whole batch, and waits for nothing. Sizes may be anything: a size of 0 returns
without a launch. A launcher trusts its arguments, which the public functions of `scoped_fn.kernels` check, and runs on
CPU tensors where `TRITON_INTERPRET=1` was set before the import.
"""
