"""Ends of float32, empty batches, modes and devices: where results were once wrong, or where they easily would be."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jvp, vmap

from scoped_fn import kernels
from scoped_fn.kernels import Quantized, _reference

E4M3 = torch.float8_e4m3fn
OUT = pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])


def scaled(data: Tensor, scale: float | Tensor) -> Quantized:
    return Quantized(data.to(E4M3), None, None, torch.as_tensor(scale), None)


@OUT
@pytest.mark.parametrize(
    ("scale_a", "scale_b"),
    [(1e-25, 1e-20), (1e-19, 1e-19), (1e22, 1e17), (0.0, 1.0), (1e25, 1e25), (1e-30, 1e-30)],
)
def test_scales_near_the_ends(scale_a: float, scale_b: float, out_dtype: torch.dtype) -> None:
    # Larger than the matrices for which torch has code of its own.
    a, b = torch.randn(64, 256), torch.randn(96, 256)
    a[:, ::2], b[0] = 2.0**-9, 0.0
    left, right = scaled(a, scale_a), scaled(b, scale_b)
    left = left._replace(data=left.data.clone())
    y = kernels.scaled_mm(left, right.mT, out_dtype=out_dtype).double()
    exact = (left.data.double() @ right.data.double().mT) * scale_a * scale_b
    limit, least = torch.finfo(out_dtype).max, torch.finfo(torch.float32).tiny
    # Sums of products overflow or not before they are scaled: only what is clearly inside says anything.
    certain = exact.abs() < limit / 2
    torch.testing.assert_close(y[certain], exact[certain], rtol=1e-2, atol=max(8 * least, 2.0**-24 * (limit < 1e5)))
    assert not y[:, 0].isnan().any()


@OUT
def test_nan_is_seen_whatever_the_scales(out_dtype: torch.dtype) -> None:
    data = torch.ones(64, 128)
    data[5] = torch.nan
    for scale in (0.0, 1e-30, 1.0, 1e30):
        y = kernels.scaled_mm(scaled(data, scale), scaled(torch.ones(64, 128), scale).mT, out_dtype=out_dtype)
        assert y[5].isnan().all()
        assert not y[6].isnan().any()


def product(scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return kernels.scaled_mm(
        scaled(torch.ones(1, 4), scale_a), scaled(torch.ones(5, 4), scale_b).mT, out_dtype=torch.float32
    ).sum()


PAIR = torch.tensor([2.0, 3.0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.resets_dynamo
def test_compiled_forward_mode(backend: str) -> None:
    def tangents(scales: Tensor) -> Any:
        return jvp(lambda s: product(s[0], s[1]) + s.sum(), (scales,), (scales * scales,))

    compiled = torch.compile(tangents, backend=backend, fullgraph=True)
    assert [x.item() for x in compiled(PAIR)] == [125.0, 613.0]
    torch._dynamo.reset()


@pytest.mark.resets_dynamo
def test_compiled_hessian() -> None:
    compiled = torch.compile(hessian(lambda s: product(s[0], s[1])), backend="eager", fullgraph=True)
    assert compiled(PAIR).tolist() == [[0.0, 20.0], [20.0, 0.0]]
    torch._dynamo.reset()


def test_dual_numbers() -> None:
    with fwAD.dual_level():
        y = product(fwAD.make_dual(PAIR[0], torch.tensor(1.0)), PAIR[1])
        assert fwAD.unpack_dual(y).tangent.item() == 60.0


def test_forward_over_forward() -> None:
    assert jacfwd(jacfwd(lambda s: product(s[0], s[1])))(PAIR).tolist() == [[0.0, 20.0], [20.0, 0.0]]


# Torch asks each tensor of the graph for its gradient on the way.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.resets_dynamo
def test_compiled_autograd() -> None:
    scale = PAIR[0].clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        product(scale, PAIR[1]).backward()
    assert scale.grad is not None
    assert scale.grad.item() == 60.0
    torch._dynamo.reset()


def test_no_grad_inside_a_transform() -> None:
    recorded = torch.tensor(3.0, requires_grad=True)

    def silent(scale: Tensor) -> Tensor:
        with torch.no_grad():
            return product(scale, recorded)

    assert not grad(silent)(PAIR[0]).requires_grad
    with torch.no_grad():
        assert not jvp(lambda s: product(s, recorded), (PAIR[0],), (PAIR[0],))[1].requires_grad
    assert jvp(lambda s: product(s, recorded), (PAIR[0],), (PAIR[0],))[1].requires_grad


CASTS = {
    "bias": lambda x: kernels.scaled_mm(scaled(ONES, 1.0), scaled(ONES, 1.0).mT, bias=x, out_dtype=torch.float32),
    "scale": lambda x: kernels.scaled_mm(scaled(ONES, x[:, None]), scaled(CODES, 0.3).mT, out_dtype=torch.float32),
}
ONES, CODES = torch.ones(8, 300), torch.randn(8, 300)


@pytest.mark.parametrize("name", CASTS)
def test_autocast_changes_no_derivative(name: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return CASTS[name](x).square().mean()

    x = torch.rand(8) + 0.1
    want = grad(loss)(x), jvp(loss, (x,), (x,))[1]
    with torch.autocast("cpu", torch.bfloat16):
        got = grad(loss)(x), jvp(loss, (x,), (x,))[1]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("quantize", [lambda x: kernels.quantize_mx(x, E4M3), kernels.quantize_nvfp4])
def test_autocast_changes_no_product(quantize: Any) -> None:
    a, b = torch.randn(8, 320), torch.randn(8, 320)
    want = kernels.scaled_mm(quantize(a), quantize(b).mT, out_dtype=torch.float32)
    rotated = kernels.hadamard_16(a, torch.ones(16))
    with torch.autocast("cpu", torch.bfloat16):
        got = kernels.scaled_mm(quantize(a), quantize(b).mT, out_dtype=torch.float32)
        torch.testing.assert_close(kernels.hadamard_16(a, torch.ones(16)), rotated, rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: kernels.quantize_current(x, E4M3).data,
        lambda x: kernels.quantize_blocks(x, E4M3, transpose=True).scale_inv_t,
        lambda x: kernels.quantize_mx(x, E4M3).scale_inv,
        lambda x: kernels.dequantize(kernels.quantize_current(x, E4M3)),
        lambda x: kernels.scaled_mm(kernels.quantize_current(x, E4M3), scaled(torch.ones(5, 4), 1.0).mT),
        lambda x: kernels.update_scales(x, torch.ones(4), fp8_max=448.0)[0],
    ],
)
def test_a_mapped_dimension_of_nothing(call: Any) -> None:
    one = call(torch.ones(3, 4))
    batched = vmap(call)(torch.ones(0, 3, 4))
    assert batched.shape == (0, *one.shape)
    assert batched.dtype == one.dtype
    nested = vmap(vmap(call))(torch.ones(2, 0, 3, 4))
    assert nested.shape == (2, 0, *one.shape)


def test_jacobian_by_no_scales() -> None:
    jacobian = jacfwd(lambda s: kernels.dequantize(scaled(torch.ones(0, 3), s)))(torch.ones(0, 1))
    assert jacobian.shape == (0, 3, 0, 1)


def test_sizes_that_change_after_an_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            quantized = kernels.quantize_current(x, E4M3)
            y = kernels.scaled_mm(quantized, kernels.quantize_current(w, E4M3).mT)
            return y.sum() + kernels.dequantize(quantized).sum()

    rows = torch.export.Dim("rows", min=2, max=4096)
    w = torch.randn(6, 32)
    program = torch.export.export(Model(), (torch.randn(260, 32), w), dynamic_shapes=({0: rows}, None)).module()
    for size in (2, 6, 128, 129, 1000):
        x = torch.randn(size, 32)
        torch.testing.assert_close(program(x, w), Model()(x, w), rtol=0, atol=0)


META = torch.ones((), device="meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.dequantize(scaled(ONES, META)),
        lambda: kernels.quantize_nvfp4(ONES, noise=torch.rand(8, 300, device="meta")),
        lambda: kernels.dequantize(kernels.quantize_nvfp4(ONES)._replace(amax=META)),
        lambda: kernels.scaled_mm(
            kernels.quantize_mx(ONES, E4M3), kernels.quantize_mx(ONES.to("meta"), E4M3, transpose=False).mT
        ),
        lambda: kernels.scaled_mm(
            kernels.quantize_mx(ONES, E4M3), kernels.quantize_mx(ONES, E4M3).mT, bias=torch.ones(8, device="meta")
        ),
    ],
)
def test_parts_on_several_devices(call: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected .* on (cpu|meta), got (meta|cpu)\. Move it"):
        call()


@pytest.mark.parametrize(("shape", "rows"), [((1, 100_000), 128), ((100_000, 1), 1), ((1, 100_000), 1)])
def test_thin_matrices_are_not_padded_to_whole_blocks(shape: tuple[int, int], rows: int) -> None:
    assert _reference._blocks(torch.ones(1, *shape), rows, 128).numel() < 1.01 * 100_000


def test_many_biases_take_one_product() -> None:
    left, right = scaled(torch.randn(64, 300), 0.5), scaled(torch.randn(32, 300), 0.25).mT
    biases = torch.randn(16, 32)
    batched = vmap(lambda bias: kernels.scaled_mm(left, right, bias=bias, out_dtype=torch.float32))(biases)
    plain = kernels.scaled_mm(left, right, out_dtype=torch.float32)
    torch.testing.assert_close(batched, plain + biases[:, None])
    assert len(_reference._once(left.data.expand(16, 64, 300))) == 1
