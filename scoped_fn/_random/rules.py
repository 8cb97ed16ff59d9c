"""Which operations of torch draw random numbers, and what takes their place so that they draw from a key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scoped_fn import random
from scoped_fn._errors import RandomOpError
from scoped_fn._random import drops, recurrent
from scoped_fn._random import operations as ops
from scoped_fn._random.rows import rows_folded

Rule = Callable[..., Any]

ALWAYS: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "bernoulli": ops.bernoulli,
        "multinomial": ops.multinomial,
        "normal": ops.normal,
        "rand": ops.rand,
        "rand_like": ops.rand_like,
        "randint": ops.randint,
        "randint_like": ops.randint_like,
        "randn": ops.randn,
        "randn_like": ops.randn_like,
        "randperm": ops.randperm,
        **{name: ops.fill(name) for name in ops.FILLS},
    }
)
# They draw in training, with a probability that is not 0.
DROPS: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "alpha_dropout": drops.alpha_dropout,
        "alpha_dropout_": partial(drops.alpha_dropout, inplace=True),
        "dropout": drops.dropout,
        "dropout_": partial(drops.dropout, inplace=True),
        "dropout1d": partial(drops.feature_dropout, dim=2),
        "dropout2d": drops.feature_dropout,
        "dropout3d": partial(drops.feature_dropout, dim=4),
        "feature_alpha_dropout": drops.feature_alpha_dropout,
        "feature_alpha_dropout_": partial(drops.feature_alpha_dropout, inplace=True),
        "feature_dropout": drops.feature_dropout,
        "feature_dropout_": partial(drops.feature_dropout, inplace=True),
        "native_dropout": drops.native_dropout,
        "rrelu": drops.rrelu,
        "rrelu_": partial(drops.rrelu, inplace=True),
        "scaled_dot_product_attention": drops.scaled_dot_product_attention,
    }
)
# Functions of torch, written in Python, that draw inside.
WITH_DROPS: Final = ("multi_head_attention_forward",)
RECURRENT: Final = ("gru", "lstm", "rnn_relu", "rnn_tanh")
WITH_DRAWS: Final = ("gumbel_softmax",)
POOLS: Final = MappingProxyType(
    {
        "fractional_max_pool2d": 2,
        "fractional_max_pool2d_with_indices": 2,
        "fractional_max_pool3d": 3,
        "fractional_max_pool3d_with_indices": 3,
    }
)
NAMES: Final = MappingProxyType({"input": "x", "self": "x", "key": "keys", "train": "training"})
OF_LAYOUT: Final = ("layout", "memory_format", "pin_memory")
REFUSED: Final = ("generator", "names", "out", "requires_grad")


@dataclass(frozen=True)
class Keyed:
    """A random operation that draws from a key: `(words of a key, *arguments) -> result`."""

    operation: str
    rule: Rule
    renamed: bool = True

    @property
    def __name__(self) -> str:
        return f"{self.operation}_from_key"

    def __call__(self, words: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the operation's result; inside vmap with a key for each index, if that is what it says."""
        kwargs = _meant(self.operation, kwargs)
        return self.rule(rows_folded(words), *args, **(_renamed(kwargs) if self.renamed else kwargs))


def keyed(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str = "") -> Keyed | None:
    """Returns what takes the place of a call that draws random numbers; None for any other call.

    Raises:
        RandomOpError: It has an option that cannot be; `place` says where.
    """
    name = _name(target)
    rule, found = ALWAYS.get(name) or DROPS.get(name), None
    if rule is not None:
        found = Keyed(name, rule) if name in ALWAYS or _drops(rule, (None, *args), _renamed(kwargs)) else None
    elif name in WITH_DRAWS or (name in WITH_DROPS and _drops(target, args, kwargs)):
        found = Keyed(name, partial(_inside, target), renamed=False)
    elif name in POOLS and not hasattr(target, "namespace") and kwargs.get("_random_samples") is None:
        found = Keyed(name, partial(drops.fractional_max_pool, target, POOLS[name]), renamed=False)
    elif name in RECURRENT and recurrent.drops(args):
        found = Keyed(name, partial(recurrent.layer_by_layer, target), renamed=False)
    if found is not None:
        _meant(name, kwargs, place)  # what is wrong is said before anything runs
    return found


def _name(target: Any) -> str:
    """Returns an operation's name without its overload; '' for what is not torch's."""
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None) or ""
    if module.startswith(("torch.ops.", "torch._ops.")) and not module.endswith(".aten"):
        return ""  # an operator of another library, which may have any name
    owner = getattr(getattr(target, "__objclass__", None), "__name__", "")
    torchs = module.startswith("torch") or owner.startswith("Tensor") or type(target).__name__.startswith("builtin")
    return str(getattr(target, "__name__", "")).partition(".")[0] if torchs else ""


def _drops(rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = inspect.signature(rule).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    chance = values.get("p", values.get("dropout_p", 1.0))
    return values.get("training", True) is not False and chance != 0


def _renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of torch under the names that rules have for them."""
    return {NAMES.get(name, name): value for name, value in kwargs.items()}


def _meant(name: str, kwargs: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Returns keyword arguments without those that have no meaning here; raises for what cannot be done."""
    wrong = [option for option in REFUSED if kwargs.get(option) not in (None, False)]
    if wrong:
        raise RandomOpError(refused_option(name, wrong[0], place))
    return {option: value for option, value in kwargs.items() if option not in (*OF_LAYOUT, *REFUSED)}


def refused_option(name: str, option: str, place: str) -> str:
    """Returns the message about an option that cannot be where numbers come from a key."""
    return (
        f"Expected random operations of {name} without {option}=, since their numbers come from the state's key, got "
        f"one{place}. Leave it out, pass the numbers as an argument, or compile with rng='torch'."
    )


class KeyedMode(TorchFunctionMode):
    """Runs code so that its random operations draw from keys, the i-th of them from `key_of(i)`.

    Attributes:
        count: How many have drawn.
    """

    def __init__(self, key_of: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.key_of, self.count = key_of, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = keyed(function, args, kwargs or {})
        if rule is None:
            return function(*args, **(kwargs or {}))
        self.count += 1
        return rule(self.key_of(self.count - 1), *args, **(kwargs or {}))


class DrawsSeen(TorchFunctionMode):
    """Runs code as it is.

    Attributes:
        found: Whether there was a random operation.
    """

    found = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            self.found = self.found or keyed(function, args, kwargs or {}) is not None
        except RandomOpError:  # it draws, and is refused where it has to draw from a key
            self.found = True
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class OwnDraws:
    """Code that draws random numbers, as a node of a graph.

    Attributes:
        code: A function of tensors.
        from_key: Whether the words of a key follow these: then draw i is from key i + 1 of those that are split off.
    """

    code: Callable[..., Any]
    from_key: bool = False

    @property
    def __name__(self) -> str:
        return "own_draws_from_key" if self.from_key else "own_draws"

    def __call__(self, *given: Tensor) -> Any:
        """Returns the results of the code."""
        if not self.from_key:
            return self.code(*given)
        with KeyedMode(lambda i: random.fold_in(given[-1], i + 1)):
            return self.code(*given[:-1])


def _inside(function: FunctionType, words: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of `torch.nn.functional` whose random operations draw from keys made from one."""
    names = {**vars(F), "has_torch_function": _never, "has_torch_function_unary": _never}
    plain = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    plain.__kwdefaults__ = function.__kwdefaults__
    with KeyedMode(lambda i: random.fold_in(words, i)):
        return plain(*args, **kwargs)


def _never(*tensors: Any) -> bool:
    """In place of torch's question whether a call is to be overridden: a mode does not see what is called inside."""
    return False


__all__ = ["DrawsSeen", "Keyed", "KeyedMode", "OwnDraws", "keyed"]
