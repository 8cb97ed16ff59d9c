"""`fp8_linear`, `fp8_matmul`: what they compute, and their gradients at every order, by kernels called by hand."""

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from scoped_fn.kernels import (
    MatmulRule,
    Quantizer,
    dequantize,
    encode_weight,
    fp8_linear,
    fp8_matmul,
    quantize,
    scaled_mm,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DELAYED = MatmulRule(Quantizer("delayed"), Quantizer("delayed"), Quantizer("delayed", E5M2), (True, False, False))
SCALES = tuple(torch.tensor(scale) for scale in (16.0, 64.0, 256.0))
KINDS = ("current", "blocks", "mx", "nvfp4")


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in ((5, 7), (3, 7), (3,), (5, 3)))  # type: ignore[return-value]


def rule_of(kind: str) -> str:
    return str(MatmulRule(*[Quantizer(kind)] * 3))


def delayed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, sink: torch.Tensor | None = None) -> Any:
    return fp8_linear(x, w, b, str(DELAYED), SCALES, sink)


def test_results_and_gradients_are_those_of_the_kernels_called_by_hand() -> None:
    x, w, b, dy = data()
    qx, qw, qdy = (quantize(t, s, f) for t, s, f in zip((x, w, dy), SCALES, (E4M3, E4M3, E5M2), strict=True))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y, amax, _ = delayed(*leaves)
    found = torch.autograd.grad(y, leaves, dy)
    wanted = [scaled_mm(qdy, qw, out_dtype=x.dtype), scaled_mm(qdy.mT, qx, out_dtype=x.dtype), dy.sum(0)]
    assert torch.equal(y, scaled_mm(qx, qw.mT, bias=b, out_dtype=x.dtype))
    assert torch.equal(amax, torch.stack([x.abs().max(), w.abs().max()]))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_chain_of_sinks_gives_the_greatest_amax() -> None:
    x, w, b, _ = data()

    def loss(sink: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
        total = torch.zeros(())
        for factor in factors:
            y, _, sink = delayed(factor * x, w, b, sink)
            total = total + y.square().sum()
        return total

    alone = [grad(loss)(torch.zeros(()), (factor,)) for factor in (1.0, 3.0, 2.0)]
    together = grad(loss)(torch.zeros(()), (1.0, 3.0, 2.0))
    assert len({float(amax) for amax in alone}) == 3
    assert together == max(alone)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_differentiated_carries_a_gradient(needs: tuple[bool, ...]) -> None:
    tensors = [t.clone().requires_grad_(wanted) for t, wanted in zip(data()[:3], needs, strict=True)]
    y, amax, sink = delayed(*tensors)
    assert (y.requires_grad, amax.requires_grad, sink.requires_grad) == (any(needs), False, False)


def test_tangents_are_products_of_what_the_codes_stand_for() -> None:
    x, w, b, _ = data()
    tx, tw, tb, _ = data(1)
    values_x, values_w = (dequantize(quantize(t, s, E4M3)).double() for t, s in zip((x, w), SCALES, strict=False))
    tangent = jvp(lambda *t: delayed(*t)[0], (x, w, b), (tx, tw, tb))[1]
    wanted = tx.double() @ values_w.T + values_x @ tw.double().T + tb.double()
    torch.testing.assert_close(tangent, wanted.float())


def test_second_derivatives_are_straight_through() -> None:
    x, w, b, _ = data()
    values = dequantize(quantize(w, SCALES[1], E4M3))
    found = hessian(lambda x: delayed(x, w, b)[0].square().sum())(x)
    wanted = 2 * torch.einsum("ij,nk,nl->ikjl", torch.eye(5), values, values)
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("kind", ["delayed", *KINDS])
def test_gradients_for_each_example_are_those_of_a_loop(kind: str) -> None:
    x, w, b, _ = data()
    rule, scales = (str(DELAYED), SCALES) if kind == "delayed" else (rule_of(kind), (None,) * 3)

    def loss(w: torch.Tensor, sink: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return fp8_linear(row[None], w, b, rule, scales, sink)[0].square().sum()

    slopes = grad(loss, argnums=(0, 1))
    together = vmap(slopes, (None, None, 0))(w, torch.zeros(()), x)
    loop = [torch.stack(parts) for parts in zip(*[slopes(w, torch.zeros(()), row) for row in x], strict=True)]
    for ours, theirs in zip(together, loop, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


SHAPES = [
    ((4, 6), (6, 3)), ((2, 5, 4, 6), (6, 3)), ((2, 4, 6), (2, 6, 3)), ((2, 5, 4, 6), (5, 6, 3)), ((6,), (6, 3)),
    ((4, 6), (6,)), ((6,), (5, 6, 3)), ((4, 6), (5, 6, 3)), ((0, 6), (6, 3)), ((2, 0, 6), (2, 6, 3)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_takes_the_shapes_of_torch(kind: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    x, w = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    exact = x @ w
    y = fp8_matmul(x, w, rule_of(kind))[0]
    assert y.shape == exact.shape
    assert (y - exact).norm() <= 0.3 * exact.norm()
    ours = torch.autograd.grad(y.sum(), (x, w))
    for got, want in zip(ours, torch.autograd.grad(exact.sum(), (x, w)), strict=True):
        assert (got - want).norm() <= 0.3 * want.norm()


@pytest.mark.parametrize(("left", "right"), SHAPES[:6])
def test_the_weight_may_come_first(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    w, x = torch.randn(left), torch.randn(right)
    y = fp8_matmul(x, w, rule_of("current"), swapped=True)[0]
    assert y.shape == (w @ x).shape
    assert (y - w @ x).norm() < 0.1 * (w @ x).norm()


@pytest.mark.parametrize("kind", ["delayed", "current", "blocks", "mx"])
def test_a_weight_quantized_before_gives_the_same_bits(kind: str) -> None:
    x, w, b, dy = data()
    rule = DELAYED if kind == "delayed" else MatmulRule.parse(rule_of(kind))
    scales = SCALES if kind == "delayed" else (None,) * 3
    codes, amax = encode_weight(w, rule.weight, scales[1])
    codes = (*codes, *(None,) * (4 - len(codes)))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    fresh, cached = (fp8_linear(*leaves, str(rule), scales, None, given) for given in ((None,) * 4, codes))
    assert torch.equal(fresh[0], cached[0])
    assert cached[1][1] == 0
    assert amax == (w.abs().max() if kind == "delayed" else 0)
    for ours, theirs in zip(*(torch.autograd.grad(y[0], leaves, dy) for y in (cached, fresh)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_gradients_by_other_tensors(backward: str) -> None:
    x, w, _, dy = data()
    rule = MatmulRule(*[Quantizer("current")] * 3, backward=backward)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    dx, dw = torch.autograd.grad(fp8_linear(*leaves, None, str(rule))[0], leaves, dy)
    values = [dequantize(quantize(t, 448 / t.abs().max(), E4M3)) for t in (x, w)]
    used = values if backward == "dequantized" else (x, w)
    torch.testing.assert_close(dx, dy @ used[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw, dy.T @ used[0], rtol=1e-5, atol=1e-5)


def test_calibrating_computes_the_bits_of_an_ordinary_layer_and_records() -> None:
    x, w, b, _ = data()
    rule = MatmulRule(*[Quantizer("delayed")] * 3, calibrating=True)
    y, amax, _ = fp8_linear(x, w, b, str(rule), SCALES)
    assert torch.equal(y, torch.nn.functional.linear(x, w, b))
    assert torch.equal(amax, torch.stack([x.abs().max(), w.abs().max()]))
