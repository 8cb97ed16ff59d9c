"""Derivatives of `scaled_mm` and `dequantize` by scales and bias equal those of the exact product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import scoped_fn as sf
from scoped_fn import kernels
from scoped_fn.kernels import Quantized

M, K, N = 5, 150, 3
LAYOUTS = {
    "tensor": ((), ()),
    "row": ((M, 1), (1, N)),
    "block": ((M, 2), (2, N)),
    "square block": ((1, 2), (2, 1)),
    "mixed": ((M, 2), ()),
}
Scales = tuple[Tensor, Tensor, Tensor]


def codes(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(torch.float8_e4m3fn)


A, B_T = codes(1, M, K), codes(2, N, K)


def product(scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
    a = Quantized(A, None, None, scale_a, None)
    b_t = Quantized(B_T, None, None, scale_b.mT if scale_b.dim() else scale_b, None)
    return kernels.scaled_mm(a, b_t.mT, bias=bias, out_dtype=torch.float32).sin()


def exact(scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
    """The same in plain torch, in the dtype of the scales."""

    def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
        if scale.dim() == 0:
            return scale
        scale = scale if scale.shape[0] in (1, rows) else scale.repeat_interleave(128, 0)[:rows]
        return scale if scale.shape[1] in (1, columns) else scale.repeat_interleave(128, 1)[:, :columns]

    a, b = A.to(scale_a.dtype) * spread(scale_a, M, K), B_T.to(scale_b.dtype).mT * spread(scale_b, K, N)
    return (a @ b + bias).sin()


def inputs(layout: str, dtype: torch.dtype = torch.float32) -> Scales:
    shape_a, shape_b = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(5)
    sizes = (shape_a, shape_b, (N,))
    scale_a, scale_b, bias = ((torch.rand(size, generator=generator) + 0.5).mul(0.01).to(dtype) for size in sizes)
    return scale_a, scale_b, bias


ARGS = (0, 1, 2)
Function = Callable[..., Any]
TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: grad(lambda *s: f(*s).square().sum(), ARGS),
    "jacrev": lambda f: jacrev(f, ARGS),
    "jacfwd": lambda f: jacfwd(f, ARGS),
    "vjp": lambda f: lambda *s: vjp(f, *s)[1](f(*s).cos()),
    "jvp": lambda f: lambda *s: jvp(f, s, tuple(t + 1 for t in s)),
    "hessian": lambda f: hessian(lambda *s: f(*s).sum(), ARGS),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda *s: f(*s).sum(), ARGS), ARGS),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda *s: f(*s).sum(), ARGS), ARGS),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(lambda *s: f(*s).sum(), ARGS), ARGS),
    "jvp of jvp": lambda f: (
        lambda *s: jvp(lambda *t: jvp(f, t, tuple(u * u for u in t))[1], s, tuple(t + 1 for t in s))
    ),
    "jvp of jvp of grad": lambda f: (
        lambda *s: jvp(
            lambda *t: jvp(grad(lambda *u: f(*u).sum()), t, tuple(u * u for u in t))[1], s, tuple(t + 1 for t in s)
        )
    ),
    "vmap of jvp of grad": lambda f: (
        lambda *s: vmap(lambda *t: jvp(grad(lambda *u: f(*u).sum()), t, tuple(u * u for u in t))[1])(
            *(torch.stack([t, 2 * t]) for t in s)
        )
    ),
    "grad of grad": lambda f: grad(lambda *s: grad(lambda *s: f(*s).sum())(*s).square().sum(), ARGS),
    "vmap of grad": lambda f: (
        lambda *s: vmap(grad(lambda *s: f(*s).sum(), ARGS))(*(torch.stack([t, 2 * t]) for t in s))
    ),
    "compiled grad": lambda f: torch.compile(
        grad(lambda *s: f(*s).square().sum(), ARGS), fullgraph=True, backend="aot_eager"
    ),
    "compiled vmap of grad": lambda f: torch.compile(
        lambda *s: vmap(grad(lambda *s: f(*s).sum(), ARGS))(*(torch.stack([t, 2 * t]) for t in s)),
        fullgraph=True,
        backend="aot_eager",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.resets_dynamo
def test_equals_the_exact_product(transform: Callable[[Function], Function], layout: str) -> None:
    ours = transform(product)(*inputs(layout))
    theirs = transform(exact)(*inputs(layout, torch.float64))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, check_dtype=False)
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_autograd_and_dequantize(layout: str) -> None:
    scale, *_ = inputs(layout)
    scale.requires_grad_()
    kernels.dequantize(Quantized(A, None, None, scale, None)).square().sum().backward()
    want = grad(lambda s: exact_values(s).square().sum())(scale.detach().double())
    torch.testing.assert_close(scale.grad, want, check_dtype=False)


def exact_values(scale: Tensor) -> Tensor:
    if scale.dim() == 0:
        return A.double() * scale
    rows = scale if scale.shape[0] in (1, M) else scale.repeat_interleave(128, 0)[:M]
    return A.double() * (rows if scale.shape[1] == 1 else rows.repeat_interleave(128, 1)[:, :K])


def test_compiled_by_the_front_door() -> None:
    scales = inputs("row")
    state, fn = sf.compile(sf.init_state(), product, scales, backend="eager")
    state, (value, gradients) = sf.value_and_grad(lambda s, *a: (fn(s, *a)[0], fn(s, *a)[1].sum()), argnums=ARGS)(
        state, *scales
    )
    torch.testing.assert_close(value, product(*scales).sum())
    torch.testing.assert_close(gradients, grad(lambda *s: product(*s).sum(), ARGS)(*scales))


DETACH = r"Expected no derivative with respect to FP8 data, got one.*rule of its own"


def test_data_has_no_derivative() -> None:
    x = torch.randn(M, K, requires_grad=True)
    quantized = kernels.quantize_current(x, torch.float8_e4m3fn)
    y = kernels.scaled_mm(quantized, Quantized(B_T, None, None, torch.ones(()), None).mT)
    with pytest.raises(RuntimeError, match=DETACH):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=DETACH):
        kernels.dequantize(quantized).sum().backward()


def test_gradients_outside_of_autocast_only() -> None:
    scales = inputs("tensor")
    with torch.autocast("cpu", torch.bfloat16):
        inside = product(*scales)
    torch.testing.assert_close(inside, product(*scales), rtol=0, atol=0)
