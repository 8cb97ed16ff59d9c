"""Shared kit for the scoped_fn acceptance cases (plain Python, no pytest).

A case is driven through a *compiler*: a callable

    run = compiler(fn_or_module, args, kwargs, **opts)

whose result ``run(*args, **kwargs)`` must behave like ``fn_or_module`` itself:
same outputs, same gradients on the leaves that were passed in and on the
module's parameters, same buffer values after the call.

* ``EAGER``            returns the function itself (the oracle)
* ``TorchCompile(b)``  is plain ``torch.compile(backend=b)``
* ``Fp8Ref()``         is a small FP8 reference written in eager PyTorch

To test scoped_fn write one adapter of the same shape.  ``opts`` a case may
pass: ``fp8`` (recipe name: 'current' | 'delayed' | 'block' | 'mx'),
``history`` (delayed amax history length), ``skip`` (patterns of layer names to
keep in high precision).  For 'delayed', ``run`` must also offer

    run.end_step()   close one optimiser step (may do nothing)
    run.fp8_state()  {site: {role: {'history': [newest first], 'scale': float}}}
                     role in 'x', 'w', 'g'

and raise ``NotApplicable`` for what an adapter cannot express.
"""
from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import math
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree


class NotApplicable(Exception):
    """The compiler under test has no way to run this scenario."""


@dataclass(frozen=True)
class Case:
    name: str
    source: str  # owner/repo#number
    area: str
    symptom: str  # one line, what the reporters saw
    build: Callable[[], tuple]  # -> (module_or_fn, args, kwargs); a tuple of modules where two are needed
    expectations: tuple
    held_back: bool = False
    hand: Callable | None = None  # hand(record): literal expected values
    scenario: Callable | None = None  # scenario(compiler): raises AssertionError
    compare: bool = True  # also compare a full record with eager
    fd: bool = False  # eager gradient confirmed by finite differences
    loss_outputs: tuple | None = None  # which float outputs enter the loss
    strides: bool = False  # output strides are part of the contract
    tol: tuple = (1e-5, 1e-6)
    seed: int = 0
    may_refuse: tuple = ()  # words, one of which a deliberate refusal must contain
    decision: str = ""  # what the product still has to decide / document
    needs: tuple = ()  # 'jax', 'triton', 'dist'

    @property
    def url(self):
        repo, num = self.source.split(" ")[0].split("#")
        return f"https://github.com/{repo}/issues/{num}"


# --------------------------------------------------------------------------
# compilers


class Eager:
    name = "eager"

    def __call__(self, fn, args=(), kwargs=None, **opts):
        return fn


EAGER = Eager()


class TorchCompile:
    def __init__(self, backend="aot_eager", **kw):
        self.backend, self.kw = backend, kw
        self.name = f"torch.compile[{backend}]"

    def __call__(self, fn, args=(), kwargs=None, **opts):
        if opts:
            raise NotApplicable("plain torch.compile has no " + ",".join(opts))
        torch._dynamo.reset()
        return torch.compile(fn, backend=self.backend, **self.kw)


# --------------------------------------------------------------------------
# driving and comparing


@dataclass
class Record:
    outputs: list = field(default_factory=list)
    spec: Any = None
    grads: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)
    params: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    raw: Any = None


def _named(tree):
    return {pytree.keystr(k): v for k, v in pytree.tree_flatten_with_path(tree)[0]}


def _snap(t):
    return t.detach().clone() if isinstance(t, torch.Tensor) else t


def weighted_loss(out, which=None):
    """A scalar that treats every output element differently."""
    fl = [
        o
        for o in pytree.tree_leaves(out)
        if isinstance(o, torch.Tensor)
        and o.requires_grad
        and (o.is_floating_point() or o.is_complex())
    ]
    if which is not None:
        fl = [fl[i] for i in which]
    tot = None
    for k, o in enumerate(fl):
        w = torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=torch.float64)[: o.numel()]
        v = (o * (w.view(o.shape).to(o.dtype) * (k + 1))).sum()
        v = v.real if v.is_complex() else v
        tot = v if tot is None else tot + v
    return tot


def drive(case, compiler=EAGER, backward=True):
    torch.manual_seed(case.seed)
    fn, args, kwargs = case.build()
    run = compiler(fn, args, kwargs)
    torch.manual_seed(case.seed + 1)
    out = run(*args, **kwargs)
    rec = Record(raw=out)
    leaves, rec.spec = pytree.tree_flatten(out)
    rec.outputs = [_snap(o) for o in leaves]
    rec.flags = [
        (o.requires_grad, o.dtype, tuple(o.stride())) if isinstance(o, torch.Tensor) else type(o).__name__
        for o in leaves
    ]
    ins = {k: v for k, v in _named((args, kwargs)).items() if isinstance(v, torch.Tensor)}
    loss = weighted_loss(out, case.loss_outputs) if backward else None
    if loss is not None:
        loss.backward()
    rec.inputs = {k: _snap(v) for k, v in ins.items()}
    rec.grads = {f"arg{k}": _snap(v.grad) for k, v in ins.items() if v.is_leaf and v.requires_grad}
    if isinstance(fn, torch.nn.Module):
        rec.buffers = {k: _snap(v) for k, v in fn.named_buffers()}
        rec.params = {k: _snap(v) for k, v in fn.named_parameters()}
        rec.grads |= {k: _snap(p.grad) for k, p in fn.named_parameters()}
    return rec


def _close(a, b, tol):
    try:
        torch.testing.assert_close(a, b, rtol=tol[0], atol=tol[1], equal_nan=True, check_stride=False)
        return None
    except AssertionError as e:
        return " ".join(str(e).split())[:160]


def diff(ref, got, tol=(0, 0), strides=False):
    """Differences between two records; 'soft:' marks None-versus-zero gradients."""
    out = []
    if ref.spec != got.spec:
        out.append(f"output structure {got.spec} != {ref.spec}")
    for i, (a, b) in enumerate(zip(ref.outputs, got.outputs)):
        if isinstance(a, torch.Tensor):
            m = _close(b, a, tol)
            if m:
                out.append(f"output[{i}]: {m}")
            ra, rb = ref.flags[i], got.flags[i]
            if ra[0] != rb[0]:
                out.append(f"output[{i}] requires_grad {rb[0]} != {ra[0]}")
            if strides and ra[2] != rb[2]:
                out.append(f"output[{i}] stride {rb[2]} != {ra[2]}")
        elif type(a) is not type(b) or a != b:
            out.append(f"output[{i}]: {b!r} != {a!r}")
    for what in ("grads", "buffers", "params", "inputs"):
        A, B = getattr(ref, what), getattr(got, what)
        if A.keys() != B.keys():
            out.append(f"{what} keys differ: {sorted(A.keys() ^ B.keys())}")
        for k in A.keys() & B.keys():
            a, b = A[k], B[k]
            if a is None or b is None:
                if a is not b:
                    other = b if a is None else a
                    zero = not bool(other.any())
                    out.append(f"{'soft: ' if zero else ''}{what}[{k}] {'None' if b is None else 'tensor'}"
                               f" where eager has {'None' if a is None else 'tensor'}")
                continue
            m = _close(b, a, tol)
            if m:
                out.append(f"{what}[{k}]: {m}")
    return out


def fd_check(case, eps=1e-6):
    """Directional finite differences of the eager loss against eager autograd."""
    g = torch.Generator().manual_seed(7)

    def leaves(fn, args, kwargs):
        d = {f"arg{k}": v for k, v in _named((args, kwargs)).items()
             if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf}
        if isinstance(fn, torch.nn.Module):
            d |= {k: p for k, p in fn.named_parameters() if p.requires_grad}
        return d

    rec = drive(case)
    torch.manual_seed(case.seed)
    ref = leaves(*case.build())
    for name, leaf in ref.items():
        assert leaf.dtype in (torch.float64, torch.complex128), (case.name, name, leaf.dtype)
        d = torch.randn(leaf.shape, dtype=leaf.dtype, generator=g)

        def loss_at(s):
            torch.manual_seed(case.seed)
            fn, args, kwargs = case.build()
            with torch.no_grad():
                leaves(fn, args, kwargs)[name].add_(d, alpha=s)
            torch.manual_seed(case.seed + 1)
            return weighted_loss(fn(*args, **kwargs), case.loss_outputs).item()

        num = (loss_at(eps) - loss_at(-eps)) / (2 * eps)
        gr = rec.grads[name]
        ana = 0.0 if gr is None else (gr.conj() * d).sum().real.item()
        assert math.isclose(num, ana, rel_tol=2e-4, abs_tol=1e-6), (case.name, name, num, ana)


def check_eager(case):
    """Self-consistency of the oracle; raises on the first problem."""
    if case.compare:
        a, b = drive(case), drive(case)
        d = diff(a, b)
        assert not d, f"eager is not reproducible: {d}"
        if case.hand:
            case.hand(a)
        if case.fd:
            fd_check(case)
    if case.scenario:
        case.scenario(EAGER)
        if case.area.startswith("fp8"):
            case.scenario(Fp8Ref())


def check_with(case, compiler):
    """Problems found when the case goes through ``compiler`` (empty list = pass)."""
    bad = []
    if case.compare:
        try:
            ref, got = drive(case), drive(case, compiler)
            bad += diff(ref, got, case.tol, case.strides)
            if case.hand:
                case.hand(got)
        except NotApplicable:
            raise
        except Exception as e:
            bad += _problem(case, e)
    if case.scenario:
        try:
            case.scenario(compiler)
        except NotApplicable:
            raise
        except Exception as e:
            bad += _problem(case, e)
    return bad


def _problem(case, e):
    text = " ".join(str(e).split())
    if not isinstance(e, AssertionError) and any(w.lower() in text.lower() for w in case.may_refuse):
        return []
    return [f"{type(e).__name__}: {text[:200]}"]


# --------------------------------------------------------------------------
# small assertions used by the cases


def same(a, b, rtol=1e-5, atol=1e-6, msg=""):
    a = torch.as_tensor(a) if not isinstance(a, torch.Tensor) else a.detach()
    b = torch.as_tensor(b, dtype=a.dtype) if not isinstance(b, torch.Tensor) else b.detach()
    m = _close(a, b.to(a.dtype), (rtol, atol))
    assert m is None, f"{msg} {m}"


def finite(*ts):
    for t in ts:
        assert bool(torch.isfinite(t).all()), f"non-finite values: {t}"


def clear_error(e, *words):
    """An acceptable refusal: mentions at least one of the given words."""
    s = str(e).lower()
    assert any(w.lower() in s for w in words), f"error does not explain itself: {type(e).__name__}: {e}"


def global_fingerprint():
    """Process-wide things a scoped compiler must leave exactly as it found them."""
    import torch._dynamo.config as dc
    import torch._functorch._aot_autograd.graph_compile as gc
    import torch._functorch.aot_autograd as aa
    import torch._functorch.config as fc
    import torch._inductor.config as ic

    def cfg(c):
        d = c.get_config_copy()
        return {k: repr(v) for k, v in d.items() if not k.startswith("_")}

    return {
        "linear": F.linear, "Linear.forward": torch.nn.Linear.forward,
        "Module.__call__": torch.nn.Module.__call__,
        "Function.apply": torch.autograd.Function.apply, "Tensor.backward": torch.Tensor.backward,
        "autograd.grad": torch.autograd.grad, "aot": aa.aot_export_joint_with_descriptors,
        "stage2": gc.aot_stage2_compile, "compile": torch.compile,
        "dynamo.config": cfg(dc), "functorch.config": cfg(fc), "inductor.config": cfg(ic),
        "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def fingerprint_diff(a, b):
    out = []
    for k in a:
        if a[k] != b[k]:
            out.append(k if not isinstance(a[k], dict) else
                       f"{k}: " + ",".join(x for x in a[k] if a[k][x] != b[k].get(x)))
    return out


# --------------------------------------------------------------------------
# FP8 reference in eager PyTorch

FMAX = {"e4m3": 448.0, "e5m2": 57344.0}
FDT = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FREL = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}  # half ulp, relative, normal numbers
FSUB = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}  # half of the smallest subnormal


def scale_from_amax(amax, fmax, prev=1.0):
    """448/amax with the guards people had to add: zero and non-finite amax keep
    the previous scale, an infinite quotient becomes the largest float32."""
    if amax == 0 or not math.isfinite(amax):
        return prev
    s = torch.tensor(fmax, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
    return float(s) if torch.isfinite(s) else torch.finfo(torch.float32).max


def qdq(x, scale, fmt):
    """Quantise-dequantise with explicit saturation; NaN/inf stay visible as NaN."""
    s = torch.as_tensor(scale, dtype=torch.float32)
    y = (x.float() * s).clamp(-FMAX[fmt], FMAX[fmt]).to(FDT[fmt]).float() / s
    return torch.where(torch.isfinite(x), y, torch.full_like(y, float("nan")))


def block_amax(t, rows, cols):
    """Per-element map of the block maximum (ragged edge blocks allowed)."""
    R, C = t.shape
    p = F.pad(t.abs().float(), (0, -C % cols, 0, -R % rows))
    b = p.view(p.shape[0] // rows, rows, p.shape[1] // cols, cols).amax((1, 3))
    return b.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:R, :C]


def e8m0_floor(amax):
    """Shared exponent of an MX block: 2**(floor(log2 amax) - 8), 1 for a zero block."""
    e = torch.frexp(amax)[1] - 1
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), (e - 8).clamp(-127, 127)), torch.ones_like(amax))


class _Recipe:
    def __init__(self, kind, history):
        self.kind, self.hlen = kind, history
        self.sites = {}
        self.pending = {}

    def q(self, t, site, role, is_weight=False):
        """t is [rows, contraction]."""
        fmt = "e5m2" if role == "g" and self.kind in ("current", "delayed") else "e4m3"
        if self.kind == "current":
            return qdq(t, scale_from_amax(float(t.abs().max()) if t.numel() else 0.0, FMAX[fmt]), fmt)
        if self.kind == "delayed":
            st = self.sites.setdefault(site, {}).setdefault(role, {"history": [0.0] * self.hlen, "scale": 1.0})
            a = float(t.abs().max()) if t.numel() else 0.0
            old = self.pending.get((site, role), 0.0)
            self.pending[site, role] = a if a != a or old != old else max(a, old)
            return qdq(t, st["scale"], fmt)
        if self.kind == "block":
            am = block_amax(t, 128 if is_weight else 1, 128)
            sc = torch.where(am > 0, FMAX[fmt] / am.clamp_min(1e-38), torch.ones_like(am))
            return qdq(t, sc.clamp_max(torch.finfo(torch.float32).max), fmt)
        if self.kind == "mx":
            return qdq(t, 1.0 / e8m0_floor(block_amax(t, 1, 32)), fmt)
        raise ValueError(self.kind)

    def end_step(self):
        for (site, role), a in self.pending.items():
            st = self.sites[site][role]
            st["history"] = [a] + st["history"][:-1]
            # one poisoned step (NaN/inf amax) is ignored by the maximum, not fatal
            good = [h for h in st["history"] if math.isfinite(h)]
            fm = FMAX["e5m2" if role == "g" else "e4m3"]
            st["scale"] = scale_from_amax(max(good, default=0.0), fm, st["scale"])
        self.pending = {}


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, rec, site):
        x2 = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x2, w)
        ctx.rec, ctx.site, ctx.shape, ctx.has_b = rec, site, x.shape, b is not None
        y = rec.q(x2, site, "x") @ rec.q(w, site, "w", True).t()
        if b is not None:
            y = y + b.float()
        return y.to(x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        rec, site = ctx.rec, ctx.site
        g2 = g.reshape(-1, g.shape[-1])
        dx = rec.q(g2, site, "g") @ rec.q(w.t().contiguous(), site, "w", True).t()
        dw = rec.q(g2.t().contiguous(), site, "g") @ rec.q(x.t().contiguous(), site, "x").t()
        db = g2.float().sum(0).to(w.dtype) if ctx.has_b else None
        return dx.to(g.dtype).view(ctx.shape), dw.to(w.dtype), db, None, None


class Fp8Ref:
    """Reference engine: swaps the forward of this module's own nn.Linear objects."""

    name = "fp8_reference"

    def __call__(self, fn, args=(), kwargs=None, fp8="current", history=4, skip=(), **opts):
        if not isinstance(fn, torch.nn.Module):
            raise NotApplicable("reference handles modules only")
        rec = _Recipe(fp8, history)
        names = [n for n, m in fn.named_modules() if isinstance(m, torch.nn.Linear)]
        for pat in skip:
            if not any(n == pat or n.endswith("." + pat) for n in names):
                raise ValueError(f"skip pattern {pat!r} matches no layer; layers are {names}")
        for n, m in fn.named_modules():
            if isinstance(m, torch.nn.Linear) and not any(n == p or n.endswith("." + p) for p in skip):
                m.forward = types.MethodType(
                    lambda self, x, _n=n: _Fp8Linear.apply(x, self.weight, self.bias, rec, _n), m)

        def run(*a, **k):
            return fn(*a, **k)

        run.end_step = rec.end_step
        run.fp8_state = lambda: {s: {r: {"history": list(v["history"]), "scale": v["scale"]}
                                     for r, v in d.items()} for s, d in rec.sites.items()}
        run.load_fp8_state = lambda st: rec.sites.update(
            {s: {r: {"history": list(v["history"]), "scale": v["scale"]} for r, v in d.items()}
             for s, d in st.items()})
        return run


def gemm_bound(a, b, fa, fb, ga="tensor", gb="tensor", clip=False):
    """Guaranteed error bound of a[M,K] @ b[N,K].T when both are rounded to FP8.

    Holds for any sane implementation: scale up to a factor two below the ideal
    one (power-of-two scales), fp32 accumulation; ``clip`` adds the MX floor-scale
    saturation (up to one eighth)."""

    def d(t, f, g):
        t = t.detach().float()
        am = t.abs().max().expand_as(t) if g == "tensor" else block_amax(t, *g)
        rel = max(FREL[f], 0.125) if clip else FREL[f]
        return torch.maximum(rel * t.abs(), 2 * FSUB[f] * am / FMAX[f])

    A, B = a.detach().abs().float(), b.detach().abs().float()
    Da, Db = d(a, fa, ga), d(b, fb, gb)
    return Da @ B.t() + A @ Db.t() + Da @ Db.t() + 1e-5 * (A @ B.t()) + 1e-30


def assert_fp8_linear(x, w, b, g, y, dx, dw, db, gx="tensor", gw="tensor", fmt_g="e5m2", clip=False,
                      out_rel=0.0):
    """y, dx, dw, db of an FP8 linear stay inside the rounding bound of the exact ones."""
    X, W, G = (t.detach().double() for t in (x.reshape(-1, x.shape[-1]), w, g.reshape(-1, g.shape[-1])))
    bias = b.detach().double() if b is not None else 0.0

    def within(name, got, exact, bound):
        err = (got.detach().double().reshape(exact.shape) - exact).abs()
        lim = bound.double() + out_rel * exact.abs() + 1e-6 * exact.abs()
        assert bool((err <= lim).all()), f"{name}: error {err.max():.3e} above its bound {lim.flatten()[err.argmax()]:.3e}"

    within("y", y, X @ W.t() + bias, gemm_bound(X, W, "e4m3", "e4m3", gx, gw, clip))
    within("dx", dx, G @ W, gemm_bound(G, W.t().contiguous(), fmt_g, "e4m3", gx, gw, clip))
    within("dw", dw, G.t() @ X, gemm_bound(G.t().contiguous(), X.t().contiguous(), fmt_g, "e4m3", gx, gx, clip))
    if b is not None:
        within("db", db, G.sum(0), 1e-6 * G.abs().sum(0) + 1e-12)


# --------------------------------------------------------------------------
# JAX interop: a careful reference and the naive raw-dlpack behaviour


class RefInterop:
    """Copies, and refuses what it cannot represent."""

    name = "reference interop"

    @staticmethod
    def to_jax(t):
        import jax
        import jax.numpy as jnp

        t = t.detach().resolve_conj().resolve_neg().contiguous().clone()
        if not jax.config.jax_enable_x64:
            narrow = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
            if t.dtype in narrow:
                n = t.to(narrow[t.dtype])
                if not torch.equal(n.to(t.dtype), t) and t.dtype is torch.int64:
                    raise OverflowError("int64 value does not fit int32; set jax_enable_x64")
                t = n
        return jnp.array(jax.dlpack.from_dlpack(t), copy=True)

    @staticmethod
    def to_torch(a):
        return torch.from_dlpack(a).clone()

    @staticmethod
    def as_jax(fn, *example, **static):
        """A jax function of float arrays calling the torch function, with its vjp."""
        import jax
        import numpy as np

        def tt(a):
            return torch.from_numpy(np.array(a))

        def host(*xs):
            with torch.no_grad():
                return fn(*map(tt, xs), **static).numpy()

        def host_vjp(g, *xs):
            ts = [tt(x) for x in xs]
            for t in ts:
                if t.is_floating_point():
                    t.requires_grad_()
            with torch.enable_grad():
                y = fn(*ts, **static)
                diffable = [t for t in ts if t.requires_grad]
                gs = torch.autograd.grad(y, diffable, tt(g), allow_unused=True)
            return tuple(np.zeros_like(t.detach().numpy()) if v is None else v.numpy()
                         for t, v in zip(diffable, gs))

        def spec(xs):
            with torch.no_grad():
                y = fn(*[torch.zeros(x.shape, dtype=getattr(torch, str(x.dtype))) for x in xs], **static)
            return jax.ShapeDtypeStruct(tuple(y.shape), str(y.dtype).removeprefix("torch."))

        @jax.custom_vjp
        def f(*xs):
            return jax.pure_callback(host, spec(xs), *xs, vmap_method="sequential")

        def fwd(*xs):
            return f(*xs), xs

        def bwd(xs, g):
            fl = [x for x in xs if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
            gs = iter(jax.pure_callback(host_vjp, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in fl),
                                        g, *xs, vmap_method="sequential"))
            return tuple(next(gs) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else None for x in xs)

        f.defvjp(fwd, bwd)
        return f


class NaiveInterop(RefInterop):
    """What raw dlpack does on its own (the counterpart of plain torch.compile)."""

    name = "raw dlpack"

    @staticmethod
    def to_jax(t):
        import jax

        return jax.dlpack.from_dlpack(t)

    @staticmethod
    def to_torch(a):
        return torch.from_dlpack(a)

    @staticmethod
    def as_jax(fn, *example, **static):
        raise NotApplicable("raw dlpack has no function wrapper")


Eager.interop = RefInterop()
TorchCompile.interop = NaiveInterop()
Fp8Ref.interop = RefInterop()
