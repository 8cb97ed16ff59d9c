"""Layers that are frozen, adapted, shared, called twice, or in another dtype: as in the eager reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.networks import Loss, LowRank, Projections, Tied, Twice, mlp
from tests.fp8.reference import Reference
from tests.fp8.scoped import KINDS, Run, newest, scales, scoped
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = tuple[Tensor, Tensor]


def data(count: int, outputs: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    return [(torch.randn(5, 8).to(dtype), torch.randn(5, outputs).to(dtype)) for _ in range(count)]


def descended(run: Run, batch: Batch) -> tuple[Run, Tensor, dict[str, Tensor | None]]:
    """A step by `backward()`, of the parameters that learn."""
    learns = {name: one.requires_grad for name, one in run.fn.params.items()}
    leaves = {name: own.detach().requires_grad_(learns[name]) for name, own in run.params.items()}
    state, sinks = sf.watch_gradients(run.state)
    state, loss = run.fn(state, leaves, *batch)
    loss.backward()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    params = {name: own if grads[name] is None else own.detach() - 0.05 * grads[name] for name, own in leaves.items()}
    return Run(sf.update_scales(sf.stage_gradients(state, sinks)), run.fn, params), loss.detach(), grads


def assert_trains_like_the_reference(model: nn.Module, batches: list[Batch], kind: str) -> Run:
    run, reference = scoped(model, batches[0], kind), Reference(model, kind)
    for batch in batches:
        run, loss, _ = descended(run, batch)
        assert_same(loss, reference.step(*batch), what="loss")
        if kind == "delayed":
            assert scales(run.state) == reference.describe()
    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", [LowRank, Projections, Tied, Twice])
def test_it_trains_like_the_reference(network: type[nn.Module], kind: str) -> None:
    assert_trains_like_the_reference(Loss(network()), data(4), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["net.0.bias", "net.0", "net.2.weight", "net.2"])
def test_a_frozen_parameter(frozen: str, kind: str) -> None:
    model = Loss(mlp())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    run = assert_trains_like_the_reference(model, data(3, 4), kind)
    _, _, grads = descended(run, data(1, 4)[0])
    assert {name for name, slope in grads.items() if slope is None} == {n for n in grads if n.startswith(frozen)}


def test_a_frozen_weight_changes_no_other_gradient() -> None:
    model, (batch,) = Loss(mlp()), data(1, 4)
    _, _, expected = descended(scoped(model, batch, "current"), batch)
    model.net[2].weight.requires_grad_(False)
    _, _, grads = descended(scoped(model, batch, "current"), batch)
    assert grads.pop("net.2.weight") is None
    assert_same(grads, {name: expected[name] for name in grads})


def test_a_site_that_needs_no_gradient_at_all_has_no_gradient_amax() -> None:
    model, (batch,) = Loss(mlp()), data(1, 4)
    model.net[0].requires_grad_(False)
    run, _, _ = descended(scoped(model, batch), batch)
    assert not newest(run.state)["net.0"]["grad_output"]
    assert newest(run.state)["net.0"]["input"]
    assert newest(run.state)["net.2"]["grad_output"]


def test_adapters_may_stay_in_high_precision() -> None:
    model, (batch,) = Loss(LowRank()), data(1)
    run = scoped(model, batch, skip=("a", "b"))
    assert run.fn.sites == ("net.base",)
    run, loss, grads = descended(run, batch)
    reference = Reference(model, skip=("net.a", "net.b"))
    assert_same(loss, reference.step(*batch))
    assert grads["net.base.weight"] is None
    assert_same(run.params, {name: own.detach().requires_grad_(own.requires_grad and name not in grads)
                             for name, own in reference.model.named_parameters()})  # fmt: skip


def test_a_shared_weight_has_a_site_for_each_layer() -> None:
    run = assert_trains_like_the_reference(Loss(Tied()), data(2), "delayed")
    assert set(run.fn.sites) == {"net.first", "net.second"}
    seen = newest(run.state)
    assert seen["net.first"]["weight"] == seen["net.second"]["weight"]
    assert seen["net.first"]["input"] != seen["net.second"]["input"]


def test_a_layer_called_twice_is_one_site_with_the_larger_amax() -> None:
    (batch,) = data(1)
    model = Loss(Twice())
    run, _, _ = descended(scoped(model, batch), batch)
    assert run.fn.sites == ("net.fc",)
    seen: list[float] = []
    model.net.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max().item()))
    model(*batch)
    assert len(seen) == 2
    assert newest(run.state)["net.fc"]["input"] == pytest.approx(max(seen), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_of_half_precision(dtype: torch.dtype, kind: str) -> None:
    batches = data(4, 4, dtype)
    run = assert_trains_like_the_reference(Loss(mlp()).to(dtype), batches, kind)
    _, loss, grads = descended(run, batches[0])
    assert {one.dtype for one in (loss, *grads.values())} == {dtype}


Form = tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]
# A product, and how it wants the operands x (M, K) and w (K, N).
FORMS: dict[str, Form] = {
    "matmul": (torch.matmul, lambda x, w: (x, w)),
    "mm": (torch.mm, lambda x, w: (x, w)),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(4), x, w), lambda x, w: (x, w)),
    "linear": (torch.nn.functional.linear, lambda x, w: (x, w.T.contiguous())),
    "bmm": (torch.bmm, lambda x, w: (x[None], w[None])),
}


def slopes_of(function: Callable[..., Tensor], args: tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, ...]:
    run = scoped(lambda *args: function(*args).sin().sum(), args, kind)
    assert len(run.fn.sites) == 1
    return sf.grad(run.fn, argnums=(0, 1))(run.state, *args)[1]


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_product_is_the_same_product(form: str, kind: str) -> None:
    function, prepare = FORMS[form]
    x, w = torch.randn(5, 8), torch.randn(8, 4)
    expected = slopes_of(lambda x, w: x @ w, (x, w), kind)
    assert_same(slopes_of(function, prepare(x, w), kind), prepare(*expected), rtol=1e-5, atol=1e-5)


def test_where_only_a_bias_learns_its_gradient_is_the_sum() -> None:
    model, (batch,) = Loss(nn.Sequential(nn.Linear(8, 4))), data(1, 4)
    model.net[0].weight.requires_grad_(False)
    _, _, grads = descended(scoped(model, batch, "current"), batch)
    out = Reference(model, "current").model.net(batch[0])
    expected = 2 * (out - batch[1]) / out.numel()
    assert_same(grads["net.0.bias"], expected.detach().sum(0), rtol=1e-5, atol=1e-6)
