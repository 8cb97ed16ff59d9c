"""What the tests of faults share."""

from __future__ import annotations

import pytest
import torch

from tests.lifecycles.traps import Boom, Scene


@pytest.fixture(scope="session")
def scene() -> Scene:
    """One for all tests: what the earlier ones raised must not show in the later ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests: it shows in the last bit
    made = Scene()
    torch.set_num_threads(threads)
    return made


@pytest.fixture(params=[Boom, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def error(request: pytest.FixtureRequest) -> BaseException:
    made = request.param("injected")
    assert isinstance(made, BaseException)
    return made
