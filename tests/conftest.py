"""Settings that every test runs under."""

import importlib
import os
import sys
from collections.abc import Iterator

# Before torch is imported: one compile worker, so that no process pool outlives a test, and no network or GPU for JAX
# and transformers.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

from tests.bystander import Bystander

# pytest puts the root on sys.path. A library that looks for another package of a room's name (transformers looks for
# `kernels`) must not find the room: None means "there is no such module".
sys.modules |= dict.fromkeys(("state", "kernels", "interop"))  # type: ignore[arg-type]

# Once: chex and JAX see the leaves of a state (without it they take a state for one leaf, and say nothing).
importlib.import_module("scoped_fn.interop").register_jax()

# The same examples on every run, and no deadline: the first example of a test may compile.
settings.register_profile("repository", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def _bystander() -> Bystander:
    """A function of somebody else, compiled once."""
    return Bystander()


@pytest.fixture(autouse=True)
def _bystander_stays_compiled(request: pytest.FixtureRequest, _bystander: Bystander) -> Iterator[None]:
    """No test makes somebody else's function compile again, but for those that are marked as doing so."""
    yield
    complaint = _bystander.complaint()
    assert not complaint or request.node.get_closest_marker("resets_dynamo"), complaint


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test starts from the same random numbers, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose a lot where another program has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
