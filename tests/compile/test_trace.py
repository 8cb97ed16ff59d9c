"""`capture="trace"` gives what Dynamo's capture gives, also for Python that Dynamo refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.compile.models import InPlace, Reassigned, Spare, StraightThrough, Tied, TwoPaths
from tests.helpers import assert_same, assert_trains_like_eager, compiled, process_unchanged, unchanged

X = torch.arange(12.0).view(4, 3) / 10
MODELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), (X,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (X,)),
    "tied": (Tied, (torch.tensor([0, 3, 3]),)),
    "two paths": (TwoPaths, (X,)),
    "spare": (Spare, (X,)),
    "in place": (InPlace, (torch.tensor([1.0, 2.0], requires_grad=True),)),
    "reassigned": (Reassigned, (torch.tensor([1.0, 2.0], requires_grad=True),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_trains_like_eager(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    _, fn = assert_trains_like_eager(build(), inputs, capture="trace")
    assert fn.cache_info().captures == 1


@pytest.mark.parametrize("name", MODELS)
def test_both_captures_agree_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model, results = build(), []
    for capture in ("dynamo", "trace"):
        state, fn = compiled(model, inputs, capture=capture)
        state, out = fn(state, fn.params, *inputs)
        model.zero_grad()
        weighted_loss(out).backward()
        grads = {name: None if one.grad is None else one.grad.clone() for name, one in fn.params.items()}
        results.append((out.detach(), grads, dict(state.buffers.get(fn.owner, {}))))
    assert_same(results[0], results[1])


def test_tracing_a_model_writes_to_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with process_unchanged(), unchanged(model.state_dict(), X):
        state, fn = compiled(model, (X,), capture="trace")
    identities = [id(one) for one in (*model.parameters(), *model.buffers())]
    with unchanged(model.state_dict(), X):
        fn(state, fn.params, X)
    assert [id(one) for one in (*model.parameters(), *model.buffers())] == identities


def test_python_that_dynamo_refuses_is_traced() -> None:
    logger = logging.getLogger("a model that logs")

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logger.warning("forward of %s", type(x).__name__)
            return self.linear(x)

    assert_trains_like_eager(Logs(), (X,), capture="trace")


def test_structures_go_through_a_trace() -> None:
    state, fn = compiled(lambda batch, n, how: {how: batch["a"][0] * n, "none": None, "n": n},
                         ({"a": [X]}, 3, "out"), capture="trace")  # fmt: skip
    assert_same(fn(state, {"a": [X + 1]}, 3, "out")[1], {"out": (X + 1) * 3, "none": None, "n": 3})
    assert_same(fn(state, {"a": [X]}, 4, "other")[1], {"other": X * 4, "none": None, "n": 4})


def test_a_traced_custom_function_keeps_its_backward_or_is_refused() -> None:
    x = torch.tensor([0.4, 1.6], requires_grad=True)
    try:
        state, fn = compiled(lambda x: StraightThrough.apply(x * 2).sum(), (x,), capture="trace")
    except sf.CaptureError as error:
        assert "StraightThrough" in str(error) or "autograd.Function" in str(error)
        return
    fn(state, x)[1].backward()
    assert_same(x.grad, torch.full((2,), 20.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_traced_checkpoint_saves_less_or_is_refused(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 3))

    class Checkpointed(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.inner, self.use = inner, use

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.use else self.inner(x)

    saved = []
    for use in (False, True):
        try:
            state, captured = sf.stages.capture(sf.init_state(), Checkpointed(use), (X,), mode="trace")
        except sf.CaptureError as error:
            assert use, "a model without a checkpoint region must be traced"
            assert "checkpoint" in str(error)
            return
        state, joint = sf.stages.lower_training(state, captured)
        saved.append(sf.stages.partition(state, joint)[1].saved_bytes)
    assert saved[1] < saved[0]


@pytest.mark.parametrize("name", ["custom function", "checkpoint"])
def test_a_refusal_leaves_the_process_as_it_was(name: str) -> None:
    functions = {
        "custom function": lambda x: StraightThrough.apply(x).sum(),
        "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    }
    apply = torch.autograd.Function.apply
    with process_unchanged():
        try:
            compiled(functions[name], (X.clone().requires_grad_(),), capture="trace")
        except sf.CaptureError as error:
            assert "Expected" in str(error)
    assert torch.autograd.Function.apply == apply
