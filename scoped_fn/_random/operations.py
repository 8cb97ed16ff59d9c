"""What each random operation of torch draws from a key: functions that take its arguments, with the key before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from scoped_fn import random


def bernoulli(key: Tensor, x: Tensor, p: float | Tensor | None = None) -> Tensor:
    """`torch.bernoulli`: the probabilities are the input, unless there is a `p`."""
    return _bernoulli(key.to(x.device), x, x if p is None else p)


def multinomial(key: Tensor, x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """`torch.multinomial`: classes by their weights (C) or (B, C); int64 (num_samples) or (B, num_samples)."""
    check(x.is_floating_point(), "weights of a floating point dtype", x.dtype)
    check(num_samples > 0, "a number of samples above 0", num_samples)
    shape = (num_samples, *x.shape[:-1])
    drawn = random.categorical(key.to(x.device), x.to(wide(x.dtype)).log(), -1, shape, replacement)
    return drawn.movedim(0, -1)


def normal(key: Tensor, mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, **like: Any) -> Tensor:
    """`torch.normal`: the shape of `mean` and `std`, or `size`."""
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        return _made(key, lambda k, shape, dtype: _normals(k, shape, dtype, mean, std), size or (), like)
    first: Tensor = sum(tensors[1:], tensors[0])  # for its shape, dtype and device
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))  # as in torch
    return _normals(key.to(first.device), first.shape, first.dtype, mean, std)


def rand(key: Tensor, *size: Any, **like: Any) -> Tensor:
    """`torch.rand`."""
    return _made(key, random.uniform, _size(size, like), like)


def randn(key: Tensor, *size: Any, **like: Any) -> Tensor:
    """`torch.randn`."""
    return _made(key, _normals, _size(size, like), like)


def randint(key: Tensor, *bounds: Any, **like: Any) -> Tensor:
    """`torch.randint(low, high, size)`, or without `low`, which is 0."""
    given = [*bounds, *(like.pop(name) for name in ("low", "high", "size") if name in like)]
    low, high, size = given if len(given) == 3 else (0, *given)
    like = {"dtype": torch.int64, **{name: value for name, value in like.items() if value is not None}}
    return _made(key, lambda k, shape, dtype: _integers(k, shape, low, high, dtype), size, like)


def randperm(key: Tensor, n: int, **like: Any) -> Tensor:
    """`torch.randperm`."""
    dtype = like.get("dtype") or torch.int64
    exact = 2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max
    check(n - 1 <= exact, f"as many numbers as {dtype} tells apart", n)
    return _made(key, lambda k, shape, _: random.permutation(k, n).to(dtype), (), {**like, "dtype": torch.float32})


def rand_like(key: Tensor, x: Tensor, **like: Any) -> Tensor:
    """`torch.rand_like`."""
    return rand(key, x.shape, **_like(x, like))


def randn_like(key: Tensor, x: Tensor, **like: Any) -> Tensor:
    """`torch.randn_like`."""
    return randn(key, x.shape, **_like(x, like))


def randint_like(key: Tensor, x: Tensor, *bounds: Any, **like: Any) -> Tensor:
    """`torch.randint_like(x, low, high)`, or without `low`."""
    named = {name: like.pop(name) for name in ("low", "high") if name in like}
    return randint(key, *bounds, **named, size=x.shape, **_like(x, like))


def fill(name: str) -> Callable[..., Tensor]:
    """Returns what a method such as `uniform_` becomes: it writes its draw into the tensor."""

    def draw_into(key: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs = {"low" if name == "from" else "high" if name == "to" else name: v for name, v in kwargs.items()}
        return x.copy_(FILLS[name](key.to(x.device), x, *args, **kwargs))

    draw_into.__name__ = name
    return draw_into


def _uniform(key: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    check(low <= high, "bounds in order", (low, high))
    return random.uniform(key, x.shape, x.dtype, low, high)


def _normal(key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normals(key, x.shape, x.dtype, mean, std)


def _log_normal(key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normals(key, x.shape, wide(x.dtype), mean, std).exp()


def _exponential(key: Tensor, x: Tensor, lambd: float = 1.0) -> Tensor:
    drawn = random.exponential(key, x.shape, wide(x.dtype))
    return drawn.clamp_min(torch.finfo(drawn.dtype).eps / 2) / lambd  # as in torch never 0: its logarithm is taken


def _cauchy(key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return random.cauchy(key, x.shape, wide(x.dtype)) * sigma + median


def _geometric(key: Tensor, x: Tensor, p: float) -> Tensor:
    return random.geometric(key, p, x.shape, x.dtype)


def _bernoulli(key: Tensor, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    check(isinstance(p, Tensor) or 0 <= p <= 1, "a probability from 0 to 1", p)
    p = p.to(wide(p.dtype)) if isinstance(p, Tensor) else p
    return random.bernoulli(key, p, x.shape).to(x.dtype)


def _random(key: Tensor, x: Tensor, low: int | None = None, high: int | None = None) -> Tensor:
    if high is None:  # one number is the bound; none means every number that the dtype has exactly
        low, high = (0, low) if low is not None else (0, _count(x.dtype))
    return _integers(key, x.shape, low or 0, int(high), x.dtype)


def _count(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


FILLS: Final[Mapping[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "bernoulli_": _bernoulli,
        "cauchy_": _cauchy,
        "exponential_": _exponential,
        "geometric_": _geometric,
        "log_normal_": _log_normal,
        "normal_": _normal,
        "random_": _random,
        "uniform_": _uniform,
    }
)


def _integers(key: Tensor, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
    check(low < high, "a bound above the least number", (low, high))
    drawn = torch.int64 if dtype.is_floating_point or dtype == torch.bool else dtype
    if dtype.is_floating_point:
        least, most = -torch.finfo(dtype).max, torch.finfo(dtype).max
    else:
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    check(least <= low and high - 1 <= most, f"bounds within {dtype}", (low, high))
    return random.randint(key, shape, low, high, drawn).to(dtype)


def _normals(key: Tensor, shape: Sequence[int], dtype: torch.dtype | None, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    drawn: Tensor = random.normal(key, shape, wide(dtype)) * std + mean
    return drawn.to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to draw in: of 16 bits there are so few uniform numbers that tails and rare events are lost."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check(holds: Any, expected: str, got: Any) -> None:
    """Raises `ValueError` unless an argument is one that torch takes."""
    if not holds:
        raise ValueError(f"Expected {expected}, got {got}. torch refuses this too: change the model.")


def into(x: Tensor, result: Tensor, inplace: bool) -> Tensor:
    """Returns the result, written into `x` if that is wanted."""
    return x.copy_(result) if inplace else result


def _size(size: tuple[Any, ...], like: dict[str, Any]) -> Sequence[int]:
    if "size" in like:
        return like.pop("size")  # type: ignore[no-any-return]
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _made(key: Tensor, draw: Callable[..., Tensor], size: Sequence[int], like: dict[str, Any]) -> Tensor:
    device = torch.empty(0).device if like.get("device") is None else like["device"]
    return draw(key.to(device), tuple(size), like.get("dtype"))


def _like(x: Tensor, like: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in like.items() if value is not None and name in ("dtype", "device")}
    return {"dtype": x.dtype, "device": x.device, **given}
