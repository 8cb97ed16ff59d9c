"""Each operator is one opaque node for every tracer and transform of torch, and a batch is one call."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.op_samples import FP8, Call, calls

ALL = pytest.mark.parametrize("call", calls(), ids=str)


def assert_same(got: Any, want: Any) -> None:
    """Equal to the last bit; NaN equals NaN."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@ALL
def test_opcheck(call: Call) -> None:
    # torch's check that inputs stay the same compares them with a product, which FP8 has not: here it is done by bytes.
    has_fp8 = any(tensor.dtype in FP8 for tensor in call.tensors)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(call.op, call.arguments, test_utils=checks if has_fp8 else ("test_schema", *checks))
    before = [tensor.view(torch.uint8).clone() for tensor in call.tensors]
    results = call.run(*call.tensors)
    assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(call.tensors, before, strict=True))
    # An empty result has no memory.
    memory = [t.untyped_storage().data_ptr() for t in {*call.tensors, *results} if t.numel()]
    assert len(set(memory)) == len(memory)


DIFFERENTIABLE = ("dequantize", "scaled_mm", "fake_quantize", "fp8_matmul", "fp8_matmul_backward")


# Since torch 2.14 its check asks tensors that are no leaves for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("call", [c for c in calls() if c.name in DIFFERENTIABLE], ids=str)
def test_opcheck_with_gradients(call: Call) -> None:
    arguments = tuple(
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a
        for a in call.arguments
    )
    opcheck(
        call.op, arguments, test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    )


@ALL
def test_one_node_in_a_trace(call: Call) -> None:
    gm = make_fx(call.run)(*call.tensors)
    assert [node.target for node in gm.graph.nodes if "scoped_fn" in str(node.target)] == [call.op]
    assert_same(gm(*call.tensors), call.run(*call.tensors))


@ALL
def test_exported(call: Call) -> None:
    class Model(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return call.run(*tensors)

    program = torch.export.export(Model(), call.tensors)
    assert call.op in [node.target for node in program.graph.nodes]
    assert_same(program.module()(*call.tensors), call.run(*call.tensors))


@ALL
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.resets_dynamo
def test_compiled(call: Call, backend: str) -> None:
    compiled = torch.compile(call.run, fullgraph=True, backend=backend)
    assert_same(compiled(*call.tensors), call.run(*call.tensors))
    torch._dynamo.reset()


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ours: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "scoped_fn":
            self.ours.append(func)
        return func(*args, **(kwargs or {}))


@ALL
def test_a_batch_is_one_call_and_equals_the_loop(call: Call) -> None:
    stacked = [torch.stack([tensor, tensor.roll(1, -1)]) for tensor in call.tensors]
    with CountOps() as counted:
        batched = torch.vmap(call.run)(*stacked)
    assert counted.ours == [call.op]
    loop = [call.run(*tensors) for tensors in zip(*stacked, strict=True)]
    assert_close_batches(call, batched, loop)


@ALL
def test_what_is_not_mapped_is_shared(call: Call) -> None:
    first, *others = call.tensors
    stacked = torch.stack([first, first.roll(1, -1), first], -1)
    batched = torch.vmap(call.run, in_dims=(-1, *[None] * len(others)))(stacked, *others)
    assert_close_batches(call, batched, [call.run(one, *others) for one in stacked.unbind(-1)])


@ALL
def test_nested_batches(call: Call) -> None:
    stacked = [torch.stack([torch.stack([t, t.roll(1, -1)]), torch.stack([t.roll(2, -1), t])]) for t in call.tensors]
    batched = torch.vmap(torch.vmap(call.run))(*stacked)
    loop = [call.run(*(t[i // 2, i % 2] for t in stacked)) for i in range(4)]
    assert_close_batches(call, [result.flatten(0, 1) for result in batched], loop)


def assert_close_batches(call: Call, batched: Any, loop: list[tuple[torch.Tensor, ...]]) -> None:
    """Equal to the last bit, except where a matmul or a mean may add in another order."""
    stacked = [torch.stack(results) for results in zip(*loop, strict=True)]
    if call.name == "scaled_mm":
        torch.testing.assert_close(batched[0], stacked[0], rtol=2e-3, atol=1e-4)
    else:
        assert_same(batched, stacked)


@pytest.mark.parametrize("call", [c for c in calls() if c.name not in DIFFERENTIABLE], ids=str)
def test_no_derivative_is_an_error(call: Call) -> None:
    tensors = [t.clone().requires_grad_() if t.dtype == torch.float32 else t for t in call.tensors]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    assert leaves
    recorded = [result for result in call.run(*tensors) if result.requires_grad]
    for result in recorded:
        with pytest.raises(RuntimeError, match=r"Expected no derivative through scoped_fn\.\w+.*detached tensor"):
            torch.autograd.grad(result, leaves, torch.ones_like(result), retain_graph=True)
    with pytest.raises(RuntimeError, match=r"Expected no derivative through scoped_fn"), fwAD.dual_level():
        call.run(*(fwAD.make_dual(t.detach(), t.detach()) if t.requires_grad else t for t in tensors))


def test_statistics_carry_no_gradient() -> None:
    x = torch.randn(1, 4, 4, requires_grad=True)
    data, _, amax, scale_inv = torch.ops.scoped_fn.quantize_current(x, FP8[0], False, 0.0, False)
    assert data.requires_grad
    assert not amax.requires_grad
    assert not scale_inv.requires_grad
