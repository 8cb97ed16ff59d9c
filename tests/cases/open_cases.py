"""Open half of the acceptance cases.  Every snippet is written from scratch; the
``source`` names the public report that shows people really hit the problem."""
from __future__ import annotations

import dataclasses
import subprocess
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cases.casekit import (Case, Fp8Ref, NotApplicable, assert_fp8_linear, clear_error, finite, fingerprint_diff,
                     global_fingerprint, same)

OPEN = []


def case(**kw):
    OPEN.append(Case(held_back=False, **kw))


D = torch.float64


def leaf(*v, dtype=D, shape=None):
    t = torch.tensor(v, dtype=dtype)
    return (t.view(shape) if shape else t).requires_grad_()


# ------------------------------------------------------------------ torch.func


def _vmap_build():
    return lambda x: (x.sin() * x.cumsum(-1)).sum(), (torch.linspace(-1, 2, 4, dtype=D),), {}


def _vmap_scn(compiler):
    fn, args, kw = _vmap_build()
    run = compiler(fn, args, kw)
    xs = torch.linspace(-1, 2, 12, dtype=D).view(3, 4)
    same(torch.func.vmap(run)(xs), torch.stack([fn(r) for r in xs]), msg="vmap")
    g = torch.func.vmap(torch.func.grad(run))(xs)
    same(g, torch.stack([torch.autograd.functional.jacobian(fn, r) for r in xs]), msg="vmap(grad)")


case(name="vmap_over_compiled", source="pytorch/pytorch#128711", area="torch.func",
     symptom="vmap around an already compiled function raises, or only works by silently running eager",
     build=_vmap_build, scenario=_vmap_scn,
     expectations=("vmap(fn) equals a stack of per-row eager calls", "vmap(grad(fn)) equals per-row gradients",
                   "the compiled graph really runs (no silent eager fallback)"))


def _p5_build():
    return lambda x: (x**5).sum(), (leaf(1.0, 2.0, -0.5),), {}


def _p5_scn(compiler):
    fn, (x,), kw = _p5_build()
    run = compiler(fn, (x,), kw)
    g, = torch.autograd.grad(run(x), x, create_graph=True)
    gg, = torch.autograd.grad(g.sum(), x)
    same(gg, 20 * x.detach() ** 3, msg="autograd second derivative")
    h = torch.func.grad(lambda z: torch.func.grad(run)(z).sum())(x.detach())
    same(h, 20 * x.detach() ** 3, msg="grad(grad)")


case(name="second_derivative", source="pytorch/pytorch#91469", area="torch.func",
     symptom="second derivative of a compiled function: bogus numbers in old releases, refused since",
     build=_p5_build, scenario=_p5_scn, fd=True, may_refuse=("double backward", "second", "higher"),
     expectations=("second derivative is 20 x^3", "or a clear error; never a wrong number"))


def _jvp_build():
    return lambda x: (x**2).sum(), (torch.tensor([0.5, 1.0, -3.0]),), {}


def _jvp_scn(compiler):
    import torch.autograd.forward_ad as fwad

    fn, (x,), kw = _jvp_build()
    v = torch.tensor([1.0, 2.0, 0.25])
    want = 2 * (x * v).sum()  # 3.5
    run = compiler(fn, (x,), kw)
    with fwad.dual_level():
        t = fwad.unpack_dual(run(fwad.make_dual(x, v))).tangent
    assert t is not None, "forward-mode tangent silently dropped"
    same(t, want, msg="dual tangent")
    same(torch.func.jvp(compiler(fn, (x,), kw), (x,), (v,))[1], want, msg="func.jvp")


case(name="forward_mode_tangent", source="pytorch/pytorch#187284", area="torch.func",
     symptom="forward-mode tangent through the compiled function comes back as None without any error",
     build=_jvp_build, scenario=_jvp_scn,
     expectations=("jvp equals 2 x.v = 3.5 by torch.func.jvp and by dual numbers", "never a missing tangent"))


def _tr_build():
    return lambda x: torch.trace(x.view(2, 2)) ** 2, (torch.tensor([1.0, -1.0, 0.5, 2.0]),), {}


def _tr_scn(compiler):
    fn, (x,), kw = _tr_build()
    e = torch.tensor([1.0, 0.0, 0.0, 1.0])
    want = 2 * torch.outer(e, e)
    same(torch.func.hessian(compiler(fn, (x,), kw))(x), want, msg="hessian(compiled)")
    same(compiler(torch.func.hessian(fn), (x,), kw)(x), want, msg="compiled hessian")


case(name="hessian_of_trace", source="pytorch/pytorch#190855", area="torch.func",
     symptom="compiled Hessian of an expression with torch.trace has a constant added to entries that must be 0",
     build=_tr_build, scenario=_tr_scn,
     expectations=("Hessian has 2 at the four (0/3,0/3) entries and 0 elsewhere, in both nesting orders",))


def _bng_build():
    torch.manual_seed(3)
    return nn.BatchNorm1d(3).double(), (torch.randn(5, 3, dtype=D, requires_grad=True),), {}


def _bng_scn(compiler):
    m, (x,), kw = _bng_build()
    ref, _, _ = _bng_build()
    z = x.detach().clone().requires_grad_()
    (ref(z) ** 3).sum().backward()
    run = compiler(m, (x,), kw)
    loss = lambda t: (run(t) ** 3).sum()
    if compiler.name == "eager":
        # eager itself refuses captured-buffer mutation; explicit buffers work
        try:
            torch.func.grad(loss)(x.detach())
            raise AssertionError("eager accepted a captured in-place buffer update")
        except RuntimeError as e:
            clear_error(e, "in-place", "mutate")
        m2, _, _ = _bng_build()
        start = dict(m2.named_buffers())

        def pure(t, bufs):
            bufs = {k: b.clone() for k, b in bufs.items()}
            return (torch.func.functional_call(m2, bufs, (t,)) ** 3).sum(), bufs

        g, new = torch.func.grad(pure, has_aux=True)(x.detach(), start)
        assert int(start["num_batches_tracked"]) == 0, "state passed in was written to"
    else:
        try:
            g = torch.func.grad(loss)(x.detach())
        except RuntimeError as e:
            return clear_error(e, "in-place", "mutate", "buffer", "state")
        new = dict(m.named_buffers())
    same(g, z.grad, msg="gradient")
    for k, b in ref.named_buffers():
        same(new[k], b, msg=k)


case(name="batchnorm_under_func_grad", source="pytorch/pytorch#85533", area="buffers",
     symptom="torch.func.grad of a module with BatchNorm running statistics raises about in-place buffer updates",
     build=_bng_build, scenario=_bng_scn, fd=True,
     expectations=("gradients equal eager", "running mean/var/count updated exactly once per call and returned as state",
                   "the caller's module is not written to by the pure function"))


# ------------------------------------------------------- aliasing and mutation


def _mda_build():
    def f(a):
        seen = a.detach()
        a.mul_(3)
        return a, seen

    return f, (torch.ones(3) * 5,), {}


def _mda_scn(compiler):
    fn, _, kw = _mda_build()
    x = torch.ones(3, requires_grad=True)
    h = x * 5
    try:
        a, seen = compiler(fn, (h,), kw)(h)
    except Exception as e:
        return clear_error(e, "mutat", "in-place", "inplace")
    a.sum().backward()
    same(x.grad, torch.full((3,), 15.0), msg="grad through mutated input")
    same(seen, torch.full((3,), 15.0), msg="detached alias sees the mutation")
    assert not seen.requires_grad


case(name="mutated_input_with_detached_alias", source="pytorch/pytorch#128035", area="aliasing",
     symptom="gradient becomes zero when an input that needs grad is mutated after a detached alias was taken",
     build=_mda_build, scenario=_mda_scn, compare=False,
     expectations=("x.grad is 15", "the detached alias shows 15", "or a clear error that inputs may not be mutated"),
     decision="does a pure fn copy back an input mutation, return it, or refuse it?")


def _seq_build():
    def f(a):
        a.relu_()
        a.add_(1.0)
        return a + 1

    return f, (torch.tensor([-2.0, 0.5, 3.0]),), {}


def _seq_scn(compiler):
    f, (a,), k = _seq_build()
    try:
        out = compiler(f, (a,), k)(a)
    except Exception as e:
        return clear_error(e, "mutat", "in-place", "inplace")
    same(out, [2.0, 2.5, 5.0], msg="value")
    same(a, [1.0, 1.5, 4.0], msg="input must hold the result of the last in-place op")


case(name="two_inplace_ops_on_input", source="Lightning-AI/lightning-thunder#720", area="aliasing",
     symptom="after two in-place ops the input is written back from the first intermediate, not the last",
     build=_seq_build, scenario=_seq_scn, compare=False,
     expectations=("returned [2, 2.5, 5], input [1, 1.5, 4]", "or a clear error that inputs may not be mutated"),
     decision="same decision as mutated_input_with_detached_alias")


def _exp_build():
    return lambda x: x.mean(0, keepdim=True).expand_as(x), (torch.arange(6.0, dtype=D).view(3, 2).requires_grad_(),), {}


def _exp_hand(rec):
    w = torch.linspace(0.5, 1.5, 6, dtype=D).view(3, 2)
    same(rec.grads["arg[0][0]"], (w.sum(0) / 3).expand(3, 2), msg="grad of expanded mean")


def _exp_scn(compiler):
    fn, (x,), kw = _exp_build()
    compiler(fn, (x,), kw)(x).sum().backward()  # the tangent itself is an expanded scalar
    same(x.grad, torch.ones(3, 2, dtype=D), msg="stride-0 tangent")


case(name="expanded_output", source="pytorch/pytorch#184088", area="aliasing",
     symptom="backward crashes when the output is an expanded (stride 0) tensor",
     build=_exp_build, hand=_exp_hand, scenario=_exp_scn, fd=True,
     expectations=("outputs and grads equal eager", "stride-0 tangents accepted"))


class _Ema(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([4.0, -2.0]))
        self.register_buffer("ema", torch.zeros(2))

    def forward(self, x):
        with torch.no_grad():
            self.ema.mul_(0.5).add_(0.5 * self.w)
        return (x * self.w).sum()


def _ema_build():
    return _Ema(), (torch.tensor([1.0, 3.0]),), {}


def _ema_scn(compiler):
    m, a, k = _ema_build()
    run = compiler(m, a, k)
    for want in ([2.0, -1.0], [3.0, -1.5], [3.5, -1.75]):
        run(*a).backward()
        same(m.ema, want, msg="ema after a call")
    same(m.w.grad, [3.0, 9.0], msg="accumulated grad")
    assert not m.ema.requires_grad


case(name="ema_update_under_no_grad", source="pytorch/pytorch#90844", area="buffers",
     symptom="a buffer update under no_grad inside forward is rejected or applied wrongly by AOTAutograd",
     build=_ema_build, scenario=_ema_scn,
     expectations=("buffer is 2, 3, 3.5 after three calls (updated once per call)", "weight grads unaffected"))


class _MulAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b + a

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * (b + 1), g * a


def _twice_build():
    return lambda x: _MulAdd.apply(x, x).sum(), (leaf(2.0, -1.0, 0.5),), {}


case(name="same_tensor_twice_custom_function", source="pytorch/pytorch#183604", area="aliasing",
     symptom="one of two gradient contributions is lost when a tensor is passed twice to an autograd.Function",
     build=_twice_build, fd=True, hand=lambda r: same(r.grads["arg[0][0]"], [5.0 * 0.5, -1.0 * 0.5, 2.0 * 0.5]),
     may_refuse=("duplicate",),
     expectations=("gradient is 2x+1 times the upstream weight", "or a clear error naming the duplicated input"))


def _emb_build():
    e = nn.Embedding(4, 2, max_norm=1.0)
    with torch.no_grad():
        e.weight.copy_(torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0], [0.0, 2.0]]))
    return e, (torch.tensor([0, 1, 0]),), {}


def _emb_hand(rec):
    same(rec.params["weight"], [[0.6, 0.8], [0.3, 0.4], [6.0, 8.0], [0.0, 2.0]], msg="renormalised rows")
    same(rec.outputs[0], [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]], msg="lookup")


case(name="embedding_max_norm", source="pytorch/pytorch#95167", area="buffers",
     symptom="max_norm renormalises the weight inside forward: a hidden in-place change of a parameter",
     build=_emb_build, hand=_emb_hand, may_refuse=("mutat", "in-place", "max_norm"),
     expectations=("looked-up rows (and only those) renormalised, as in eager, in the returned state",
                   "grads equal eager", "or a clear error that forward mutates a parameter"))


def _two_build():
    A, B = nn.Linear(2, 2), nn.Linear(2, 2)
    return (A, B), (torch.ones(1, 2),), {}


def _two_scn(compiler):
    torch.manual_seed(5)
    (A, B), (x,), kw = _two_build()
    wa, wb = A.weight.detach().clone(), B.weight.detach().clone()
    before = global_fingerprint()
    ra = compiler(A, (x,), kw)
    rb = compiler(B, (x,), kw)
    ya, yb = ra(x), rb(x)
    same(ya, x @ wa.t() + A.bias, msg="engine A")
    same(yb, x @ wb.t() + B.bias, msg="engine B")
    yb2 = rb(2 * x)
    (ya * torch.tensor([1.0, 2.0])).sum().backward()
    same(A.weight.grad, [[1.0, 1.0], [2.0, 2.0]], msg="A grad")
    assert B.weight.grad is None
    (yb2 * torch.tensor([1.0, 5.0])).sum().backward()
    same(B.weight.grad, [[2.0, 2.0], [10.0, 10.0]], msg="B grad uses the second call's inputs")
    (yb * torch.tensor([1.0, 5.0])).sum().backward()
    same(B.weight.grad, [[3.0, 3.0], [15.0, 15.0]], msg="B grad of the first call")
    del ra
    same(rb(x), x @ wb.t() + B.bias, msg="B after A was released")
    d = fingerprint_diff(before, global_fingerprint())
    assert not d, f"process-wide state changed: {d}"


case(name="two_engines_interleaved", source="deepspeedai/DeepSpeed#8159", area="engines",
     symptom="two compiled engines in one process consume each other's queued inputs; patches stay installed",
     build=_two_build, scenario=_two_scn, compare=False,
     expectations=("interleaved forward/backward of two engines equal eager", "releasing one leaves the other working",
                   "no process-wide patch or config change before/after (global_fingerprint)"))


def _gan_build():
    torch.manual_seed(0)
    return (nn.Linear(1, 1).double(), nn.Linear(1, 1).double()), (torch.tensor([[1.0], [2.0]], dtype=D),), {}


def _gan_scn(compiler):
    (G, Dn), (x,), kw = _gan_build()
    (G0, D0), _, _ = _gan_build()

    def step(g, d):
        f = g(x)
        (-(d(f.detach()) ** 2)).mean().backward()
        (d(f) ** 2).mean().backward()

    step(G0, D0)
    step(compiler(G, (x,), kw), compiler(Dn, (x,), kw))
    for a, b in zip((*G.parameters(), *Dn.parameters()), (*G0.parameters(), *D0.parameters())):
        same(a.grad, b.grad, msg="GAN grad")
    y = compiler(G, (x,), kw)(x)
    g1 = torch.autograd.grad(y.sum(), G.weight, retain_graph=True)[0]
    g2 = torch.autograd.grad(y.sum(), G.weight)[0]
    same(g1, g2, msg="two backwards with retain_graph")
    same(g1, [[3.0]], msg="value")


case(name="gan_two_backwards", source="pytorch/pytorch#91542", area="engines",
     symptom="discriminator used twice before backward, or retain_graph twice: graph freed, donated-buffer error",
     build=_gan_build, scenario=_gan_scn, compare=False,
     expectations=("grads equal eager with interleaved calls", "retain_graph works twice or gives a clear error"))


# ------------------------------------------------------- parameters and buffers


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2).double()
        self.spare = nn.Linear(4, 4).double()
        self.register_buffer("note", torch.arange(3.0))

    def forward(self, x):
        return self.used(x)


def _unused_scn(compiler):
    m, a, k = _unused_build()
    names = {n for n, _ in m.named_parameters()} | {n for n, _ in m.named_buffers()}
    compiler(m, a, k)(*a)
    assert names == {n for n, _ in m.named_parameters()} | {n for n, _ in m.named_buffers()}


def _unused_build():
    torch.manual_seed(1)
    return _Unused(), (torch.randn(4, 3, dtype=D),), {}


case(name="unused_parameter_and_buffer", source="meta-pytorch/autoparallel#369", area="params",
     symptom="parameters and buffers that forward never touches vanish from the captured program",
     build=_unused_build, scenario=_unused_scn,
     expectations=("unused parameter and buffer stay in the state pytree", "their gradient is None (or documented zeros)"),
     decision="None or zeros for unused parameters (weight decay differs)")


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.again = self.first

    def forward(self, x):
        return self.again(self.first(x))


def _shared_build():
    m = _Shared()
    with torch.no_grad():
        m.first.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 3.0]]))
    return m, (torch.tensor([[1.0, 1.0]]),), {}


def _shared_scn(compiler):
    m, a, k = _shared_build()
    p = m.first.weight
    run = compiler(m, a, k)
    y = run(*a)
    same(y, [[4.0, 14.0]], msg="value")
    y.sum().backward()
    assert m.first.weight is p and m.again.weight is p, "parameter object replaced"
    same(p, [[2.0, 0.0], [1.0, 3.0]], msg="parameter overwritten by the call")
    same(p.grad, [[5.0, 7.0], [5.0, 7.0]], msg="grad of both uses")
    assert len(list(m.parameters())) == 1


case(name="shared_submodule_two_paths", source="pytorch/pytorch#195593", area="params",
     symptom="functional_call with a submodule reachable by two names leaves the swapped-in value in the module",
     build=_shared_build, scenario=_shared_scn,
     expectations=("one parameter leaf, gradient sums both uses", "module parameters identical objects and values afterwards"))


class _Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))

    def forward(self, x, pos):
        self.cache[pos] = x
        return self.cache * 1.0


def _cache_build():
    return _Cache(), (torch.tensor([2.0]), torch.tensor([0])), {}


def _cache_scn(compiler):
    m, a, k = _cache_build()
    run = compiler(m, a, k)
    same(run(*a), [2.0, 0.0, 0.0])
    m.cache = torch.zeros(3)  # the user starts a new sequence
    same(run(torch.tensor([1.0]), torch.tensor([1])), [0.0, 1.0, 0.0], msg="stale cache used")
    same(m.cache, [0.0, 1.0, 0.0], msg="write went to the old buffer")


case(name="kv_cache_buffer_replaced", source="pytorch/pytorch#115774", area="buffers",
     symptom="after the user replaces a cache buffer the compiled code keeps writing to the old tensor",
     build=_cache_build, scenario=_cache_scn,
     expectations=("the state given to a call is the state it uses", "second call returns [0,1,0]"))


class _Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.5)

    def forward(self, x):
        return self.d(x) * 2


def _mode_scn(compiler):
    m, (x,), k = _mode_build()
    run = compiler(m, (x,), k)
    y = run(x)
    assert set(y.tolist()) <= {0.0, 4.0} and 10 < (y == 0).sum() < 54, "training mode must drop"
    m.eval()
    try:
        z = run(x)
    except Exception as e:
        return clear_error(e, "train", "eval", "mode")
    same(z, 2 * x, msg="dropout still active after eval()")


def _mode_build():
    return _Drop(), (torch.ones(64),), {}


case(name="dropout_eval_toggle", source="pytorch/pytorch#103681", area="rng",
     symptom="model.eval() after capture has no effect: the captured graph keeps dropping activations",
     build=_mode_build, scenario=_mode_scn, compare=False,
     expectations=("eval() honoured, or a clear error/documented that the mode is frozen at compile",),
     decision="is train/eval part of the compiled state, an argument, or a recompile?")


class _Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 3).double()
        self.A = nn.Parameter(torch.randn(2, 4, dtype=D))
        self.B = nn.Parameter(torch.randn(3, 2, dtype=D))
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.A.t() @ self.B.t()


def _lora_build():
    torch.manual_seed(2)
    return _Lora(), (torch.randn(5, 4, dtype=D),), {}


def _lora_scn(compiler):
    m, a, k = _lora_build()
    (compiler(m, a, k)(*a) ** 2).sum().backward()
    assert m.base.weight.grad is None and m.base.bias.grad is None, "frozen parameter received a gradient"
    assert m.A.grad is not None and m.B.grad is not None


case(name="frozen_base_lora", source="deepspeedai/DeepSpeed#8214", area="params",
     symptom="a model with frozen parameters cannot be compiled (KeyError while mapping gradients)",
     build=_lora_build, scenario=_lora_scn, fd=True,
     expectations=("only adapter parameters get gradients", "frozen ones stay in the state, without gradient"))


# ------------------------------------------------------------- calling convention


def _kw_build():
    def f(batch, *, scale, shift):
        return batch["a"] * scale - batch["b"] * shift

    a = {"a": leaf(1.0, 2.0), "b": leaf(10.0, 20.0)}
    return f, (a,), {"scale": leaf(3.0), "shift": leaf(0.5)}


def _kw_scn(compiler):
    f, (b,), kw = _kw_build()
    run = compiler(f, (b,), kw)
    same(run(b, **kw), [-2.0, -4.0])
    rb = {"b": b["b"], "a": b["a"]}
    out = run(rb, shift=kw["shift"], scale=kw["scale"])
    same(out, [-2.0, -4.0], msg="other insertion order")
    out.sum().backward()
    same(b["a"].grad, [3.0, 3.0], msg="grad went to the wrong key")
    same(b["b"].grad, [-0.5, -0.5])
    same(kw["shift"].grad, [-30.0])


case(name="dict_and_kwargs_order", source="pytorch/pytorch#114392", area="inputs",
     symptom="equal dicts with another insertion order flatten differently, so arguments get swapped or rejected",
     build=_kw_build, scenario=_kw_scn, fd=True,
     expectations=("results and gradients follow the key, not the position", "or a clear structure error; never a swap"))


def _none_build():
    def f(x, mask=None, n=3):
        y = x * n if mask is None else x * mask
        return y, None, n, "ok", {"loss": y.sum(), "aux": None, "shape": tuple(y.shape)}

    return f, (leaf(1.0, 2.0, 3.0),), {"mask": None, "n": 4}


case(name="none_and_python_outputs", source="pytorch/pytorch#149212", area="inputs",
     symptom="None or plain Python values among inputs/outputs crash joint export ('NoneType' has no requires_grad)",
     build=_none_build, fd=True, hand=lambda r: (same(r.outputs[0], [4.0, 8.0, 12.0]),),
     expectations=("output structure preserved including None, int, str, tuple of ints", "grads equal eager"))


def _empty_build():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).double()
    return m, (torch.zeros(0, 3, dtype=D, requires_grad=True),), {}


def _empty_scn(compiler):
    m, (x,), k = _empty_build()
    y = compiler(m, (x,), k)(x)
    assert y.shape == (0, 2)
    y.sum().backward()
    same(m[0].weight.grad, torch.zeros(2, 3, dtype=D), msg="grad of an empty batch")
    same(m[0].bias.grad, torch.zeros(2, dtype=D))
    pick = compiler(lambda t: t[[0]] if t.numel() else t.sum(), (torch.tensor([]),), {})
    same(pick(torch.tensor([])), 0.0)


case(name="empty_batch", source="pytorch/pytorch#94830", area="shapes",
     symptom="empty tensors crash the compiled code (segmentation fault in old releases)",
     build=_empty_build, scenario=_empty_scn,
     expectations=("shape (0,2) out, zero (not NaN, not None) parameter gradients", "no crash"))


# ---------------------------------------------------------------- dtype and layout


def _amp_build():
    torch.manual_seed(0)
    w = torch.randn(8, 16).requires_grad_()
    h = torch.randn(4, 16).bfloat16().requires_grad_()

    def f(x, w):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ w.t()

    return f, (h, w), {}


def _amp_scn(compiler):
    f, (h, w), k = _amp_build()
    run = compiler(f, (h, w), k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = run(h, w)
    assert o.dtype is torch.float32
    g = torch.linspace(0.1, 1, 8).expand(4, 8)
    (o * g).sum().backward()
    same(w.grad, g.t() @ h.detach().float(), rtol=1e-5, msg="fp32 island was rounded to bf16 in backward")


case(name="autocast_disabled_island", source="pytorch/pytorch#179804", area="dtype",
     symptom="backward ignores an inner autocast(enabled=False): fp32 gradient is computed in bf16",
     build=_amp_build, scenario=_amp_scn, compare=False,
     expectations=("output fp32", "weight gradient exact to fp32 (relative 1e-5)", "backward runs outside autocast"))


def _cl_build():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).double()
    m = m.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=D).to(memory_format=torch.channels_last).requires_grad_()
    return m, (x,), {}


def _cl_scn(compiler):
    for fmt in (torch.channels_last, torch.contiguous_format):
        m, (x,), k = _cl_build()
        ref, (xr,), _ = _cl_build()
        t = torch.arange(100, dtype=D).view(2, 2, 5, 5).contiguous(memory_format=fmt)
        compiler(m, (x,), k)(x).backward(t)
        ref(xr).backward(t)
        same(x.grad, xr.grad, msg=f"tangent in {fmt}")
        for p, q in zip(m.parameters(), ref.parameters()):
            same(p.grad, q.grad)


case(name="channels_last_conv", source="pytorch/pytorch#171622", area="layout",
     symptom="wrong predicted strides for channels_last convolution gradients: assertion or silent copies",
     build=_cl_build, scenario=_cl_scn, strides=True,
     expectations=("outputs keep eager strides", "grads equal eager for channels_last and contiguous tangents"))


# ----------------------------------------------------------------------------- RNG


def _rng_build():
    return lambda x: F.dropout(x, 0.5, True), (torch.ones(256),), {}


def _rng_scn(compiler):
    f, (x,), k = _rng_build()
    run = compiler(f, (x,), k)
    a, b = run(x), run(x)
    assert not torch.equal(a, b), "two calls drew the same mask: random state baked in"
    torch.manual_seed(11)
    c = run(x)
    torch.manual_seed(11)
    d = run(x)
    torch.manual_seed(12)
    e = run(x)
    assert torch.equal(c, d) and not torch.equal(c, e), "result does not follow the seed"
    for y in (a, b, c, e):
        assert set(y.tolist()) == {0.0, 2.0} and 90 < (y == 0).sum() < 166


case(name="rng_not_baked_in", source="pytorch/pytorch#172207", area="rng",
     symptom="random masks differ from eager, or are frozen at trace time, although seeds are set",
     build=_rng_build, scenario=_rng_scn, compare=False,
     expectations=("calls draw new masks", "same seed gives the same result, another seed another one",
                   "drop rate near one half"),
     decision="global generator or explicit key in the state; equality with eager's stream")


# ----------------------------------------------------------------------------- FP8


def _lin(M, K, N, bias=True, seed=0, dtype=torch.float32, scale=1.0):
    torch.manual_seed(seed)
    m = nn.Sequential()
    m.add_module("fc", nn.Linear(K, N, bias=bias))
    m = m.to(dtype)
    x = (torch.randn(M, K) * scale).to(dtype).requires_grad_()
    g = torch.randn(M, N).to(dtype)
    return m, x, g


def _quantised(compiler, y, exact):
    if compiler.name != "eager":
        assert not torch.equal(y.detach(), exact), "result is bit-identical to high precision: FP8 was not applied"


def _zero_build():
    m, x, _ = _lin(16, 32, 16)
    return m, (torch.zeros_like(x).requires_grad_(),), {}


def _zero_scn(compiler):
    for recipe in ("current", "block", "mx"):
        m, (x,), k = _zero_build()
        run = compiler(m, (x,), k, fp8=recipe) if compiler.name != "eager" else compiler(m, (x,), k)
        y = run(x)
        same(y, m.fc.bias.detach().expand(16, 16), rtol=0, atol=0, msg=f"{recipe}: zero input must give the bias")
        y.backward(torch.full_like(y, 0.25))
        finite(x.grad, m.fc.weight.grad, m.fc.bias.grad)
        same(m.fc.weight.grad, torch.zeros(16, 32), rtol=0, atol=0, msg="dw of a zero input")
        m, (x,), k = _zero_build()
        run = compiler(m, (x,), k, fp8=recipe) if compiler.name != "eager" else compiler(m, (x,), k)
        run(x).backward(torch.zeros(16, 16))  # all-zero gradient tensor
        same(x.grad, torch.zeros(16, 32), rtol=0, atol=0, msg="zero gradient")


case(name="fp8_zero_activation", source="pytorch/ao#3356", area="fp8",
     symptom="an all-zero tensor gives amax 0, scale inf, then 0*inf = NaN loss",
     build=_zero_build, scenario=_zero_scn, compare=False,
     expectations=("output is exactly the bias", "all gradients finite, dw exactly 0", "for every recipe, forward and backward"))


def _odd_build():
    m, x, _ = _lin(7, 10, 3)
    return m, (x,), {}


def _odd_scn(compiler):
    for M, K, N in ((7, 10, 3), (16, 32, 15), (1, 16, 16), (3, 33, 1)):
        for recipe, gx, gw, fg, clip in (("current", "tensor", "tensor", "e5m2", False),
                                         ("mx", (1, 32), (1, 32), "e4m3", True)):
            m, x, g = _lin(M, K, N, seed=M)
            run = compiler(m, (x,), {}, fp8=recipe) if compiler.name != "eager" else compiler(m, (x,), {})
            try:
                y = run(x)
                y.backward(g)
            except RuntimeError as e:
                clear_error(e, "divisible", "multiple", "pad", "shape")
                continue
            assert_fp8_linear(x, m.fc.weight, m.fc.bias, g, y, x.grad, m.fc.weight.grad, m.fc.bias.grad,
                              gx, gw, fg, clip)


case(name="fp8_dims_not_multiple_of_16", source="pytorch/ao#3111", area="fp8",
     symptom="'Expected trailing dimension ... divisible by 16' from batch*sequence, in- or out-features, often only in backward",
     build=_odd_build, scenario=_odd_scn, compare=False,
     expectations=("padded or left in high precision: results inside the rounding bound", "or a clear error at compile, not in backward"),
     decision="pad, fall back per layer, or refuse")


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16, bias=False)

    def forward(self, a, b):
        return self.fc(a).sum() + self.fc(b).sum()


def _tw_build():
    torch.manual_seed(0)
    m = _Twice()
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    return m, (a / a.abs().max() * 8.0, b / b.abs().max() * 2.0), {}


def _tw_scn(compiler):
    m, (a, b), k = _tw_build()
    if compiler.name == "eager":
        same(a.abs().max(), 8.0)
        return same(b.abs().max(), 2.0)
    run = compiler(m, (a, b), k, fp8="delayed", history=2)
    run(a, b).backward()
    run.end_step()
    st = run.fp8_state()
    hist = [r["x"]["history"] for r in st.values()]
    if len(hist) == 1:  # one shared meta for both calls
        assert [round(h, 4) for h in hist[0]] == [8.0, 0.0], hist
        same(st[next(iter(st))]["x"]["scale"], 448.0 / 8.0)
    else:  # one meta per call site
        assert sorted(round(h[0], 4) for h in hist) == [2.0, 8.0], hist
        assert all(h[1] == 0.0 for h in hist), "history rolled twice in one step"


case(name="fp8_same_linear_called_twice", source="NVIDIA/TransformerEngine#93", area="fp8",
     symptom="a linear used twice in one FP8 region is rejected, or the second call overwrites the first one's amax",
     build=_tw_build, scenario=_tw_scn, compare=False,
     expectations=("amax 8 and 2: shared history records the maximum 8 (or two sites record 8 and 2)",
                   "history rolls once per step"))


class _Ckpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16, bias=False)

    def forward(self, x, ckpt):
        from torch.utils.checkpoint import checkpoint

        h = checkpoint(self.fc, x, use_reentrant=False) if ckpt else self.fc(x)
        return h.tanh()


def _ck_build():
    torch.manual_seed(0)
    x = torch.randn(16, 16)
    return _Ckpt(), (x / x.abs().max() * 4.0, True), {}


def _ck_scn(compiler):
    res = []
    for flag in (False, True):
        m, (x, _), k = _ck_build()
        x = x.clone().requires_grad_()
        if compiler.name == "eager":
            run = compiler(m, (x, flag), k)
        else:
            run = compiler(m, (x, flag), k, fp8="delayed", history=4)
        rows = []
        for step in range(3):
            x.grad = m.fc.weight.grad = None
            run(x, flag).sum().backward()
            rows.append((x.grad.clone(), m.fc.weight.grad.clone()))
            if compiler.name != "eager":
                run.end_step()
        st = {} if compiler.name == "eager" else run.fp8_state()
        res.append((rows, st))
    (ra, sa), (rb, sb) = res
    for (a1, a2), (b1, b2) in zip(ra, rb):
        same(a1, b1, rtol=1e-6, atol=1e-7, msg="checkpointing changed dx")
        same(a2, b2, rtol=1e-6, atol=1e-7, msg="checkpointing changed dw")
    if sa:
        h = [v["x"]["history"] for v in sb.values()][0]
        assert [round(v, 4) for v in h] == [4.0, 4.0, 4.0, 0.0], f"one update per step expected, got {h}"
        ga, gb = ([v["g"]["history"] for v in s.values()][0] for s in (sa, sb))
        same(torch.tensor(ga), torch.tensor(gb), msg="gradient amax history differs under checkpointing")
        assert gb[2] > 0 and gb[3] == 0, "gradient amax not recorded once per step"


case(name="fp8_checkpoint_single_update", source="NVIDIA/TransformerEngine#1190", area="fp8",
     symptom="with activation checkpointing the recompute runs outside FP8 or updates amax/scale a second time",
     build=_ck_build, scenario=_ck_scn, compare=False,
     expectations=("gradients identical with and without checkpointing over three steps",
                   "forward and gradient amax recorded exactly once per step"))


def _res_build():
    torch.manual_seed(0)
    m = nn.Sequential()
    m.add_module("fc", nn.Linear(16, 16))
    return m, (torch.randn(16, 16),), {}


def _res_scn(compiler):
    if compiler.name == "eager":
        return

    def new():
        m, (x,), k = _res_build()
        return m, x, compiler(m, (x,), k, fp8="delayed", history=3)

    def step(m, x, run, t):
        m.zero_grad()
        y = run(x * (2.0**t))
        (y * y).mean().backward()
        run.end_step()
        return y.detach().clone(), m.fc.weight.grad.clone()

    m, x, run = new()
    full = [step(m, x, run, t) for t in range(5)]
    m, x, run = new()
    for t in range(3):
        step(m, x, run, t)
    saved = run.fp8_state()
    m, x, run = new()
    if not hasattr(run, "load_fp8_state"):
        raise NotApplicable("adapter cannot load a saved FP8 state")
    run.load_fp8_state(saved)
    for t in (3, 4):
        y, g = step(m, x, run, t)
        same(y, full[t][0], rtol=0, atol=0, msg=f"resumed step {t}")
        same(g, full[t][1], rtol=0, atol=0, msg=f"resumed grad {t}")


case(name="fp8_resume_from_saved_state", source="NVIDIA/TransformerEngine#982", area="fp8",
     symptom="loss explodes after restoring a checkpoint because part of the FP8 scaling state was not saved",
     build=_res_build, scenario=_res_scn, compare=False,
     expectations=("saving state after step 3 and resuming reproduces steps 4 and 5 bit for bit",
                   "everything the next step needs is in the state pytree"))


def _nan_build():
    torch.manual_seed(0)
    m = nn.Sequential()
    m.add_module("fc", nn.Linear(16, 16, bias=False))
    return m, (torch.randn(16, 16),), {}


def _nan_scn(compiler):
    m, (x,), k = _nan_build()
    eager = compiler.name == "eager"
    for bad in (float("nan"), float("inf")):
        m, (x,), k = _nan_build()
        run = compiler(m, (x,), k) if eager else compiler(m, (x,), k, fp8="delayed", history=2)

        def step(inp):
            m.zero_grad()
            y = run(inp)
            y.sum().backward()
            if not eager:
                run.end_step()
            return y.detach(), m.fc.weight.grad.clone()

        step(x)
        step(x)
        poison = x.clone()
        poison[3, 5] = bad
        y, g = step(poison)
        assert not torch.isfinite(y[3]).any(), f"{bad} input was turned into finite outputs"
        assert not torch.isfinite(g[:, 5]).any(), "poisoned gradient column looks finite"
        finite(y[:3])
        for _ in range(3):
            y, g = step(x)
            finite(y, g)
        ref = x @ m.fc.weight.detach().t()
        assert (y - ref).abs().max() < 0.2 * ref.abs().max(), "scale did not recover after one bad step"


case(name="fp8_nan_step_recovers", source="AI-Hypercomputer/maxtext#3721", area="fp8",
     symptom="one NaN/inf step poisons amax history for ever, or is hidden by replacing NaN with zero",
     build=_nan_build, scenario=_nan_scn, compare=False,
     expectations=("the bad step shows NaN in exactly the affected rows/columns", "later clean steps are finite and accurate"))


def _rag_build():
    m, x, _ = _lin(5, 640, 130)
    return m, (x,), {}


def _rag_scn(compiler):
    m, x, g = _lin(5, 640, 130, bias=False)
    with torch.no_grad():
        x[:, 0] = 3.0e4  # an outlier in the first 1x128 block only
        m.fc.weight[:, :128] = 0  # ... which the weights ignore
    run = compiler(m, (x,), {}, fp8="block") if compiler.name != "eager" else compiler(m, (x,), {})
    y = run(x)
    y.backward(g)
    assert_fp8_linear(x, m.fc.weight, None, g, y, x.grad, m.fc.weight.grad, None, (1, 128), (128, 128), "e4m3")
    _quantised(compiler, y, x.detach() @ m.fc.weight.detach().t())
    exact = x.detach().double() @ m.fc.weight.detach().double().t()
    # per-tensor scaling would flush ordinary activations to zero here
    assert (y.detach().double() - exact).norm() < 0.06 * exact.norm(), "outlier block spoiled the other blocks"


case(name="fp8_blockwise_ragged_outlier", source="pytorch/pytorch#166752", area="fp8",
     symptom="silently wrong 128x128 block-scaled results when the number of K blocks is not a multiple of 4",
     build=_rag_build, scenario=_rag_scn, compare=False,
     expectations=("K=640 (5 blocks), N=130 (ragged): results inside the block rounding bound",
                   "an outlier block does not degrade other blocks"))


# ------------------------------------------------------------- custom ops / Triton

try:
    @torch.library.custom_op("qacases::reverse_into", mutates_args=("dst",))
    def _reverse_into(src: torch.Tensor, dst: torch.Tensor) -> None:
        n = src.numel()
        for i in range(n):
            dst[n - 1 - i] = src[i]
except Exception:  # already registered by another import
    pass


def _cop_build():
    def f(x):
        keep = x.clone()
        torch.ops.qacases.reverse_into(keep, x)
        return x * 2

    return f, (torch.arange(6.0),), {}


def _cop_scn(compiler):
    f, (x,), k = _cop_build()
    try:
        out = compiler(f, (x,), k)(x)
    except Exception as e:
        return clear_error(e, "mutat", "in-place", "inplace")
    same(out, [10.0, 8.0, 6.0, 4.0, 2.0, 0.0], msg="clone removed although the op overwrites its source")


case(name="custom_op_clone_then_mutate", source="pytorch/pytorch#198031", area="triton",
     symptom="y=x.clone(); op(y,x) becomes op(x,x) for custom ops and Triton kernels that overwrite x",
     build=_cop_build, scenario=_cop_scn, compare=False,
     expectations=("output is [10,8,6,4,2,0]", "input mutation returned/visible or a clear error"))


# ------------------------------------------------------------------------ JAX side


def _dl_build():
    return (lambda x: x.t()), (torch.arange(6.0).view(2, 3),), {}


def _dl_scn(compiler):
    import numpy as np

    io = compiler.interop
    base = torch.arange(12.0).view(3, 4)
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    views = {
        "transposed": base.t(), "every second column": base[:, ::2], "expanded": torch.ones(1, 3).expand(2, 3),
        "offset": base.view(-1)[5:], "0-d": torch.tensor(3.5), "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]), "conj": z.conj(), "neg view": torch._neg_view(torch.arange(1.0, 4.0)),
        "imag of conj": z[:1].conj().imag,
    }
    for name, v in views.items():
        want = v.resolve_conj().resolve_neg().contiguous().numpy()
        try:
            got = io.to_jax(v)
        except Exception as e:
            clear_error(e, "stride", "conj", "layout", "neg")
            continue
        assert got.shape == tuple(v.shape), name
        assert np.array_equal(np.asarray(got), want), f"{name}: jax sees {np.asarray(got)} instead of {want}"
        if got.size:
            assert np.asarray(got.ravel()[got.size // 2]) == want.ravel()[got.size // 2], f"{name}: element access differs"
        back = io.to_torch(got)
        assert np.array_equal(back.numpy(), want), f"{name}: way back"


case(name="dlpack_views_and_layouts", source="jax-ml/jax#7657", area="jax",
     symptom="transposed/strided torch tensors arrive in JAX with wrong element order (prints right, indexes wrong)",
     build=_dl_build, scenario=_dl_scn, compare=False, needs=("jax",),
     expectations=("every view arrives with the right values or is refused with a clear error",
                   "negative-bit views (x.conj().imag) keep their sign"))


def _mut_build():
    return (lambda x: x.add_(1)), (torch.zeros(64),), {}


def _mut_scn(compiler):
    import jax.numpy as jnp
    import numpy as np

    io = compiler.interop
    a = jnp.arange(64.0)
    io.to_torch(a).add_(1)  # a torch function with an in-place op runs on it
    assert np.array_equal(np.asarray(a), np.arange(64.0)), "an immutable jax array changed"
    t = torch.zeros(64)
    j = io.to_jax(t)
    t.fill_(7)
    assert float(j[0]) == 0.0, "jax array follows a later torch write"


case(name="jax_array_stays_immutable", source="jax-ml/jax#19123", area="jax",
     symptom="an in-place torch op on a zero-copy view changes a supposedly immutable jax array",
     build=_mut_build, scenario=_mut_scn, compare=False, needs=("jax",),
     expectations=("jax arrays never change", "later torch writes do not leak into jax arrays",
                   "zero copy only for functions proven not to mutate"))

_HANG = r'''
import sys; sys.path.insert(0, {here!r})
import torch, numpy as np, jax, jax.numpy as jnp
from casekit import RefInterop
torch.set_num_threads(2)
w = torch.linspace(-1, 1, 300 * 300).view(300, 300)
f = RefInterop.as_jax(lambda x: (x @ w).tanh())
step = jax.jit(lambda x: f(f(x) + 1.0) * 0.5)
x = jnp.linspace(-1, 1, 300 * 300).reshape(300, 300)
for _ in range(10):
    y = step(x); g = jax.grad(lambda z: step(z).sum())(x)   # no block_until_ready in between
t = torch.linspace(-1, 1, 300 * 300).view(300, 300).requires_grad_()
h = lambda z: (z @ w).tanh()
r = h(h(t) + 1.0) * 0.5
r.sum().backward()
np.testing.assert_allclose(np.asarray(y), r.detach().numpy(), rtol=1e-3, atol=1e-3)
np.testing.assert_allclose(np.asarray(g), t.grad.numpy(), rtol=2e-2, atol=2e-3)
print("finished")
'''


def _hang_build():
    return (lambda x: x.tanh()), (torch.zeros(3),), {}


def _hang_scn(compiler):
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    if compiler.name != "eager":
        raise NotApplicable("run the child script with the adapter's own as_jax")
    p = subprocess.run([sys.executable, "-c", _HANG.format(here=here)], capture_output=True, text=True, timeout=120)
    assert "finished" in p.stdout, p.stderr[-400:]


case(name="jit_callback_no_deadlock", source="jax-ml/jax#24255", area="jax",
     symptom="a callback inside jax.jit hangs on CPU when it produces jax arrays or large inputs are dispatched async",
     build=_hang_build, scenario=_hang_scn, compare=False, needs=("jax",),
     expectations=("nested callbacks and grads under jit finish (child process, 120 s limit)", "values equal torch",
                   "callback returns numpy, never jax arrays; torch threads inside are safe"))


def _tkw_build():
    lin = nn.Linear(3, 2)
    return (lambda x, scale=1.0, flip=False: lin(x.flip(0) if flip else x) * scale), (torch.ones(4, 3),), {"scale": 2.0}


def _tkw_scn(compiler):
    import jax
    import jax.numpy as jnp
    import numpy as np

    torch.manual_seed(0)
    fn, (x,), kw = _tkw_build()
    f = compiler.interop.as_jax(fn, x, scale=2.0, flip=True)
    xs = jnp.arange(12.0).reshape(4, 3)
    want = fn(torch.arange(12.0).view(4, 3), scale=2.0, flip=True)
    np.testing.assert_allclose(np.asarray(jax.jit(f)(xs)), want.detach().numpy(), rtol=1e-5)
    g = jax.grad(lambda z: f(z).sum())(xs)
    t = torch.arange(12.0).view(4, 3).requires_grad_()
    fn(t, scale=2.0, flip=True).sum().backward()
    np.testing.assert_allclose(np.asarray(g), t.grad.numpy(), rtol=1e-5)


case(name="jax_wrapper_keyword_arguments", source="samuela/torch2jax#7", area="jax",
     symptom="the jax wrapper of a torch module takes positional arguments only; kwargs and gradients missing",
     build=_tkw_build, scenario=_tkw_scn, compare=False, needs=("jax",),
     expectations=("kwargs (tensor and static) accepted under jax.jit", "gradient equals torch; parameters need no manual detach"))


# ---------------------------------------------------------------- state as a pytree


@dataclasses.dataclass(frozen=True)
class _State:
    scale: torch.Tensor
    history: torch.Tensor
    recipe: str = "current"


def _eq_build():
    return (lambda s: s.scale * s.history), (_State(torch.ones(()), torch.zeros(4)),), {}


def _eq_scn(compiler):
    a, b = _State(torch.ones(()), torch.arange(4.0)), _State(torch.ones(()), torch.arange(4.0))
    if compiler.name == "eager":  # what a plain frozen dataclass does
        try:
            a == b
            raise AssertionError("expected the ambiguous-bool error of a plain dataclass")
        except RuntimeError as e:
            clear_error(e, "ambiguous")
        try:
            a.scale = torch.zeros(())
            raise AssertionError("frozen dataclass accepted an assignment")
        except dataclasses.FrozenInstanceError:
            pass
        a.history.add_(1)  # frozen is shallow: the tensor itself can still be written
        same(a.history, [1.0, 2.0, 3.0, 4.0])
        return
    raise NotApplicable("check on the product's CompilerState: ==, hash, setattr, shallow writes")


case(name="state_equality_and_immutability", source="pytorch/pytorch#189979", area="state",
     symptom="comparing dataclasses that hold tensors raises 'Boolean value of Tensor is ambiguous' (always so from 3.13)",
     build=_eq_build, scenario=_eq_scn, compare=False,
     expectations=("state == state and hash(state) never raise", "attribute assignment is refused",
                   "no call of fn writes into tensors of the state it was given (old state can be reused)"))
