"""The rooms keep to themselves: who imports whom, private torch, other libraries' attributes, module state."""

import pytest

from tests.source_rules import (
    RULES,
    Rule,
    foreign_assignment_rule,
    import_rule,
    module_state_rule,
    private_torch_rule,
)
from tests.source_rules.rooms import ROOT, room_files


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", room_files())
def test_source_keeps_the_rules(path: str, rule: Rule) -> None:
    assert rule(path, (ROOT / path).read_text()) == []


BROKEN = [
    (import_rule, "kernels/a.py", "import scoped_fn.state", "kernels may not import state, got scoped_fn.state"),
    (import_rule, "kernels/a.py", "import optree", "kernels may not import optree here"),
    (import_rule, "state/a.py", "from scoped_fn import compile", "state may not import scoped_fn"),
    (import_rule, "state/a.py", "from scoped_fn import kernels", "state may not import kernels"),
    (import_rule, "state/a.py", "import numpy.linalg", "state may not import numpy here"),
    (import_rule, "state/a.py", "from . import trees", "a relative import"),
    (import_rule, "state/a.py", "from .trees import tree_map", "a relative import"),
    (import_rule, "scoped_fn/a.py", "def f():\n    import scoped_fn.interop", ":2: scoped_fn may not import interop"),
    (import_rule, "scoped_fn/_compile.py", "import rich", "scoped_fn may not import rich here"),
    (import_rule, "scoped_fn/stages/cli.py", "import matplotlib", "scoped_fn may not import matplotlib here"),
    (import_rule, "interop/a.py", "import jax.numpy", "interop may not import jax here"),
    (import_rule, "interop/a.py", "import scoped_fn", "interop may not import scoped_fn here"),
    (import_rule, "interop/a.py", "def f():\n    from scoped_fn._graph import Graph", "public names of scoped_fn only"),
    (import_rule, "scoped_fn/a.py", "from unittest import mock", "scoped_fn may not import unittest here"),
    (import_rule, "state/a.py", "def f():\n    from unittest.mock import patch", "state may not import unittest here"),
    (private_torch_rule, "state/a.py", "import torch._dynamo", "private torch._dynamo"),
    (private_torch_rule, "state/a.py", "import torch.fx._utils as u", "private torch.fx._utils"),
    (private_torch_rule, "state/a.py", "from torch import _C", "private torch._C"),
    (private_torch_rule, "state/a.py", "from torch._functorch.aot import f", "private torch._functorch.aot.f"),
    (private_torch_rule, "state/a.py", "import torch\ntorch._C.x()", ":2: private torch._C.x"),
    (private_torch_rule, "state/a.py", "import torch as t\nt.fx._f()", ":2: private torch.fx._f"),
    (private_torch_rule, "state/a.py", "from torch import fx\nfx._f()", ":2: private torch.fx._f"),
    (private_torch_rule, "state/a.py", "import torch\nfx = torch.fx\nfx._f()", ":3: private torch.fx._f"),
    (private_torch_rule, "state/a.py", "import torch\ngetattr(torch, '_C')", ":2: private torch._C"),
    (private_torch_rule, "state/a.py", "import_module('torch._inductor')", "private torch._inductor"),
    (private_torch_rule, "state/a.py", "from torch.utils import _foreach", "private torch.utils._foreach"),
    (private_torch_rule, "state/a.py", "from torch.utils._pytree import _get", "private torch.utils._pytree._get"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.x = 1", ":2: changes torch"),
    (foreign_assignment_rule, "state/a.py", "import jax.config as c\nc.x += 1", ":2: changes jax.config"),
    (foreign_assignment_rule, "state/a.py", "from torch import Tensor\ndel Tensor.x", ":2: changes torch.Tensor"),
    (foreign_assignment_rule, "state/a.py", "import torch\nc = torch.cfg\nc.x = 1", ":3: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.a.b['x'] = 1", ":2: changes torch.a.b"),
    (foreign_assignment_rule, "state/a.py", "import triton\nsetattr(triton.a, 'x', 1)", ":2: changes triton.a"),
    (foreign_assignment_rule, "state/a.py", "import torch\na, torch.x = 1, 2", ":2: changes torch"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.autograd.Function = F", ":2: changes torch.autograd"),
    (foreign_assignment_rule, "state/a.py", "import torch\nobject.__setattr__(torch.a, 'x', 1)", "changes torch.a"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.a.__setattr__('x', 1)", ":2: changes torch.a"),
    (foreign_assignment_rule, "state/a.py", "import torch, builtins\nbuiltins.setattr(torch, 'x', 1)", "changes torch"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.a.__dict__['x'] = 1", "changes torch.a.__dict__"),
    (foreign_assignment_rule, "state/a.py", "import torch\nvars(torch.a)['x'] = 1", "changes torch.a.__dict__"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.a.__dict__.update(x=1)", "changes torch.a.__dict__"),
    (foreign_assignment_rule, "state/a.py", "import torch\ndel torch.a.__dict__['x']", "changes torch.a.__dict__"),
    (foreign_assignment_rule, "state/a.py", "import torch\noperator.setitem(torch.a.b, 'x', 1)", "changes torch.a.b"),
    (foreign_assignment_rule, "state/a.py", "from torch.a import table\ntable.pop('x')", "changes torch.a.table"),
    (foreign_assignment_rule, "state/a.py", "from torch.a import config\nconfig.x = 1", ":2: changes torch.a.config"),
    (foreign_assignment_rule, "state/a.py", "import torch.a.config as c\nc.x.y = 1", ":2: changes torch.a.config.x"),
    (foreign_assignment_rule, "state/a.py", "import torch\nc: Any = torch.cfg\nc.x = 1", ":3: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import torch\na, c = 1, torch.cfg\nc.x = 1", ":3: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import torch\n(c := torch.cfg).y\nc.x = 1", ":3: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import torch\ngetattr(torch, 'cfg').x = 1", ":2: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "c = import_module('torch.cfg')\nc.x = 1", ":2: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import sys\nsys.modules['torch.cfg'].x = 1", ":2: changes torch.cfg"),
    (foreign_assignment_rule, "state/a.py", "import torch\nfor torch.x in a: ...", ":2: changes torch"),
    (foreign_assignment_rule, "state/a.py", "import torch\nwith a as torch.x: ...", ":2: changes torch"),
    (foreign_assignment_rule, "state/a.py", "import torch\ntorch.compiler.reset()", "changes torch.compiler.reset"),
    (module_state_rule, "state/a.py", "memo = {}", ":1: mutable value at module level"),
    (module_state_rule, "state/a.py", "MEMO: dict[int, int] = dict()", ":1: mutable value"),
    (module_state_rule, "state/a.py", "if True:\n    a = b = [1]", ":2: mutable value"),
    (module_state_rule, "state/a.py", "PAIR = (1, {2})", ":1: mutable value"),
    (module_state_rule, "state/a.py", "counter = itertools.count()", ":1: mutable value"),
    (module_state_rule, "state/a.py", "table = collections.defaultdict[int, int](int)", ":1: mutable value"),
    (module_state_rule, "state/a.py", "class A:\n    seen = set()", ":2: mutable value"),
    (module_state_rule, "state/a.py", "squares = [i * i for i in range(3)]", ":1: mutable value"),
    (module_state_rule, "state/a.py", "def f():\n    global x\n    x = 1", ":2: a global statement"),
    (module_state_rule, "state/a.py", "def f():\n    globals()['x'] = 1", ":2: globals used as a dictionary"),
    (module_state_rule, "state/a.py", "def f():\n    f.calls += 1", ":2: an attribute of f set"),
    (module_state_rule, "state/a.py", "class A: ...\ndef f():\n    A.seen = 1", ":3: an attribute of A set"),
    (module_state_rule, "state/a.py", "class A: ...\nsetattr(A, 'seen', 1)", ":2: an attribute of A set"),
    (module_state_rule, "state/a.py", "@functools.cache\ndef f(): ...", ":1: a memo: @functools.cache"),
    (module_state_rule, "state/a.py", "@lru_cache(maxsize=1)\ndef f(): ...", ":1: a memo: @lru_cache(maxsize=1)"),
]


@pytest.mark.parametrize(("rule", "path", "text", "complaint"), BROKEN)
def test_a_broken_rule_is_seen(rule: Rule, path: str, text: str, complaint: str) -> None:
    (found,) = rule(path, text)
    assert found.startswith(f"{path}:")
    assert complaint in found


ALLOWED = [
    ("kernels/a.py", "import torch, triton.language as tl\nfrom scoped_fn.kernels import b"),
    ("kernels/_opaque_op.py", "import torch\ntorch._library.f()"),
    ("state/a.py", "from __future__ import annotations\nimport dataclasses, optree\nfrom torch import Tensor"),
    ("state/a.py", "from torch.utils import _pytree as pytree\npytree.tree_map(f, x)"),
    ("state/a.py", "import torch.utils._pytree\ntorch.utils._pytree.tree_map(f, x)"),
    ("state/a.py", "import torch\nprint(torch.__version__, torch.Tensor.__name__)"),
    ("state/a.py", '"""Says why torch._dynamo is not used."""\nraise ValueError("torch._dynamo is private.")'),
    ("scoped_fn/_torch/dynamo.py", "import torch._dynamo\nfrom torch import _C"),
    ("scoped_fn/_compile.py", "import scoped_fn.kernels\nfrom scoped_fn.state import CompilerState"),
    ("scoped_fn/_compile.py", "def f(model, gm):\n    model.weight = 1\n    gm.graph.x = 1\n    gm['a'] = 1"),
    ("scoped_fn/cli.py", "import rich.table"),
    ("scoped_fn/demo/picture.py", "def draw():\n    import matplotlib.pyplot"),
    ("scoped_fn/_runtime.py", "memo = {}"),
    ("scoped_fn/a.py", "import torch.a.config as c\nwith c.patch(x=1):\n    run()\nx = torch.add(a, b).update(c)"),
    ("interop/a.py", "import torch\nfrom scoped_fn.state import CompilerState\ndef f():\n    import jax, scoped_fn"),
    ("interop/a.py", "if TYPE_CHECKING:\n    import jax"),
    ("state/a.py", "__all__ = ['a']\nNAMES = ('a', 'b')\nSET = frozenset({1})\nMAP = MappingProxyType({1: 2})"),
    ("state/a.py", "Alias = dict[str, int] | list[int]\nT = TypeVar('T')\nkey = lambda: []\ndef f(): x = {}"),
    ("state/a.py", "@dataclass\nclass A:\n    __slots__ = ['a']\n    a: list = field(default_factory=list)"),
]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert [found for rule in RULES for found in rule(path, text)] == []
