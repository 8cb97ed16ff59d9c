"""A matmul in low precision with its gradients: one operator, and what it consists of.

Derivatives are taken on this level, where quantization counts as the identity (straight through). A graph is then
expanded, by `EXPANSIONS`, into quantizations and scaled products, in which equal quantizations can be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from scoped_fn.kernels._opaque_op import Derivative, define_op
from scoped_fn.kernels._operands import Encoded, Operand, encode, product
from scoped_fn.kernels._ops import LIBRARY
from scoped_fn.kernels.rules import MatmulRule, Quantizer

Optional = Tensor | None
Codes = tuple[Optional, Optional, Optional, Optional]
Gradients = tuple[Optional, ...]


def _forward(
    x: Tensor, w: Tensor, bias: Optional, scale_x: Optional, scale_w: Optional, scale_dy: Optional, sink: Tensor,
    data: Optional, scales: Optional, data_t: Optional, scales_t: Optional, rule: str, transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns x w.T + bias (B, G, M, N), the amaxes of x and w (B, 2), and the sink."""
    meant = MatmulRule.parse(rule)
    of_x, of_w = meant.forward_quantizers
    coded_x = encode(x, of_x, scale_x, transpose=transpose, record=meant.calibrating)
    coded_w = _encode_weight(w, of_w, scale_w, (data, scales, data_t, scales_t), transpose, meant.calibrating)
    batch, group, m, _ = x.shape
    n = w.shape[2]
    spread = None if bias is None else bias[:, None].expand(batch, group, n).flatten(0, 1)
    y = product(coded_x.rows, coded_w.rows, spread, x.dtype, meant.fast_accum[0])
    return y.view(batch, group, m, n), torch.stack([coded_x.amax, coded_w.amax], 1), sink.clone()


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, scale_x: Optional, scale_w: Optional, scale_dy: Optional,
    data: Optional, scales: Optional, data_t: Optional, scales_t: Optional, want_x: bool, want_w: bool, rule: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dx and dw, empty where they are not wanted, and the amax of dy (B,)."""
    meant = MatmulRule.parse(rule)
    of_x, of_w, of_dy = meant.backward_quantizers
    coded = encode(dy, of_dy, scale_dy, transpose=want_w, record=meant.calibrating)
    dx, dw = (t.new_empty(len(t), 0, 0, 0) for t in (x, w))
    exact = meant.backward == "dequantized"  # then by what the codes of the forward stand for
    if want_x:
        coded_w = _encode_weight(w, of_w, scale_w, (data, scales, data_t, scales_t), True, meant.calibrating)
        columns = Operand(coded_w.rows.values().mT) if exact else coded_w.columns
        dx = product(coded.rows, columns, None, x.dtype, meant.fast_accum[1]).view(x.shape)
    if want_w:
        coded_x = encode(x, of_x, scale_x, transpose=True, record=meant.calibrating)
        columns = Operand(coded_x.rows.values().mT) if exact else coded_x.columns
        dw = product(coded.columns, columns, None, w.dtype, meant.fast_accum[2]).view(w.shape)
    return dx, dw, coded.amax


def _encode_weight(
    w: Tensor, quantizer: Quantizer, scale: Optional, codes: Codes, transpose: bool, record: bool
) -> Encoded:
    data, scales, data_t, scales_t = codes
    if data is None or quantizer.kind == "none":
        return encode(w, quantizer, scale, transpose=transpose, record=record)
    assert scales is not None
    rows = Operand(data.flatten(0, 1), scales.flatten(0, 1))
    columns = Operand(rows.data.mT, scales.flatten(0, 1).mT)
    if data_t is not None and scales_t is not None:
        columns = Operand(data_t.flatten(0, 1), scales_t.flatten(0, 1))
    return Encoded(rows, columns, w.new_zeros(len(w), dtype=torch.float32))


def _fake_quantize(x: Tensor, scale: Optional, quantizer: str) -> Tensor:
    """Returns the numbers that quantized x (B, G, M, K) stands for, float32."""
    rows = encode(x, Quantizer.parse(quantizer), scale, transpose=False).rows
    return rows.values().float().view(x.shape)


# The rules of derivatives. Products are in float64, which autocast leaves alone, also inside torch.func.


def _matmul_backward(arguments: tuple[Any, ...], needs: tuple[bool, ...], *cotangents: Optional) -> Gradients:
    x, w, bias, scale_x, scale_w, scale_dy, _, *codes, rule = arguments
    dy, _, of_sink = cotangents
    none: list[Optional] = [None] * len(arguments)
    none[6] = of_sink
    if dy is None:
        return tuple(none)
    dx, dw, amax = backward_op(dy, x, w, scale_x, scale_w, scale_dy, *codes, needs[0], needs[1], rule)
    none[0], none[1] = dx if needs[0] else None, dw if needs[1] else None
    none[2] = dy.sum((1, 2)).to(bias.dtype) if needs[2] else None
    none[6] = amax if of_sink is None else torch.maximum(of_sink, amax)
    return tuple(none)


def _matmul_jvp(arguments: tuple[Any, ...], tangents: tuple[Optional, ...]) -> tuple[Optional, ...]:
    x, w, _, scale_x, scale_w = arguments[:5]
    of_x, of_w = MatmulRule.parse(arguments[-1]).forward_quantizers
    parts = []
    if tangents[0] is not None:
        parts.append(tangents[0].double() @ _values(w, scale_w, of_w).mT)
    if tangents[1] is not None:
        parts.append(_values(x, scale_x, of_x) @ tangents[1].double().mT)
    if tangents[2] is not None:
        shape = (*x.shape[:3], w.shape[2])
        parts.append(tangents[2].double()[:, None, None].expand(shape))
    none = x.new_zeros(()).expand(*x.shape[:3], w.shape[2])
    y = sum(parts[1:], parts[0]).to(x.dtype) if parts else none
    return y, None, torch.zeros_like(arguments[6]) if tangents[6] is None else tangents[6]


def _backward_backward(arguments: tuple[Any, ...], needs: tuple[bool, ...], *cotangents: Optional) -> Gradients:
    dy, x, w = arguments[:3]
    of_dx, of_dw, _ = (None if c is None or c.numel() == 0 else c.double() for c in cotangents)
    g, values_x, values_w = _backward_values(arguments)
    for_dy = _sum(
        of_dx @ values_w.mT if of_dx is not None else None, values_x @ of_dw.mT if of_dw is not None else None
    )
    for_x = g @ of_dw if of_dw is not None else None
    for_w = g.mT @ of_dx if of_dx is not None else None
    found = [None if t is None else t.to(like.dtype) for t, like in ((for_dy, dy), (for_x, x), (for_w, w))]
    return (*(t if needed else None for t, needed in zip(found, needs[:3], strict=True)), *[None] * 10)


def _backward_jvp(arguments: tuple[Any, ...], tangents: tuple[Optional, ...]) -> tuple[Optional, ...]:
    _, x, w = arguments[:3]
    want_x, want_w = arguments[10:12]
    g, values_x, values_w = _backward_values(arguments)
    of_dy, of_x, of_w = (None if t is None else t.double() for t in tangents[:3])
    dx = _sum(of_dy @ values_w if of_dy is not None else None, g @ of_w if of_w is not None else None)
    dw = _sum(of_dy.mT @ values_x if of_dy is not None else None, g.mT @ of_x if of_x is not None else None)
    nothing = [
        like.new_zeros(like.shape if wanted else (len(like), 0, 0, 0)) for like, wanted in ((x, want_x), (w, want_w))
    ]
    dx, dw = (n if t is None or not n.numel() else t.to(n.dtype) for t, n in zip((dx, dw), nothing, strict=True))
    return dx, dw, None


def _backward_values(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, w, scale_x, scale_w, scale_dy = arguments[:6]
    of_x, of_w, of_dy = MatmulRule.parse(arguments[-1]).backward_quantizers
    return _values(dy, scale_dy, of_dy), _values(x, scale_x, of_x), _values(w, scale_w, of_w)


def _values(x: Tensor, scale: Optional, quantizer: Quantizer) -> Tensor:
    if quantizer.kind == "none":
        return x.double()
    return fake_quantize_op(x, scale, str(quantizer)).double()  # type: ignore[no-any-return]


def _sum(first: Optional, second: Optional) -> Optional:
    return first if second is None else second if first is None else first + second


def _without_gradient(needs: tuple[bool, ...]) -> tuple[int, ...]:
    """Returns which results of the matmul carry none: y if neither x nor w nor bias has one, the sink as it came."""
    return (*(() if any(needs[:3]) else (0,)), 1, *(() if needs[6] else (2,)))


CODES = "Tensor? data, Tensor? scales, Tensor? data_t, Tensor? scales_t"
SCALES = "Tensor? scale_x, Tensor? scale_w, Tensor? scale_dy"


def _spread_sink(sink: Tensor, count: int) -> Tensor:
    """Returns the sink (B,) for each index of a batch, (B, count); gradients combine by maximum."""
    return sink[:, None].repeat(1, count)


def _launch(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(*arguments, False)  # type: ignore[call-arg]


fake_quantize_op = define_op(
    LIBRARY,
    "fake_quantize(Tensor x, Tensor? scale, str quantizer) -> Tensor",
    cpu=_fake_quantize,
    cuda=_fake_quantize,
    fake=lambda x, _, __: torch.empty_like(x, dtype=torch.float32),
    derivative=Derivative(
        backward=lambda arguments, _, cotangent: (cotangent.to(arguments[0].dtype), None, None),
        jvp=lambda _, tangents: tangents[0].float(),  # type: ignore[union-attr]
    ),
)
spread_sink_op = define_op(
    LIBRARY,
    "spread_sink(Tensor sink, int count) -> Tensor",
    cpu=_spread_sink,
    cuda=_spread_sink,
    fake=_spread_sink,
    derivative=Derivative(
        backward=lambda arguments, _, cotangent: (cotangent.amax(1), None),
        jvp=lambda arguments, tangents: _spread_sink(tangents[0], arguments[1]),  # type: ignore[arg-type]
    ),
)
backward_op = define_op(
    LIBRARY,
    f"fp8_matmul_backward(Tensor dy, Tensor x, Tensor w, {SCALES}, {CODES}, bool want_x, bool want_w, str rule)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_backward,
    cuda=_backward,
    fake=_backward,
    derivative=Derivative(_backward_backward, _backward_jvp, lambda needs, tracked: (2,)),
)
matmul_op = define_op(
    LIBRARY,
    f"fp8_matmul(Tensor x, Tensor w, Tensor? bias, {SCALES}, Tensor sink, {CODES}, str rule)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_launch,
    cuda=_launch,
    fake=_launch,
    spread={6: lambda sink, count: spread_sink_op(sink, count).mT},
    derivative=Derivative(
        _matmul_backward, _matmul_jvp, lambda needs, tracked: (1,) if tracked else _without_gradient(needs)
    ),
)
# Operator -> what it consists of, for a trace.
EXPANSIONS: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {matmul_op: _forward, backward_op: _backward, fake_quantize_op: _fake_quantize, spread_sink_op: _spread_sink}
)
