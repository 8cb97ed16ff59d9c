"""Everything in this folder runs on Triton's interpreter, in a process of its own: tests/kernels/test_processes.py."""

import os

# Before a kernel is decorated, that is, before a test imports one.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import settings

from tests.kernels import interpreter

torch.set_num_threads(1)
interpreter.install()

# An example takes milliseconds here, and the edges are many.
settings.register_profile("interpreted", parent=settings.get_profile("repository"), max_examples=50)
settings.load_profile("interpreted")
