"""`Job`: what is to be computed at one level of `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scoped_fn._errors import CaptureError
from scoped_fn._halves import Halves, Value
from scoped_fn._pure import Pure
from scoped_fn._torch.dual import forward_mode_active
from scoped_fn._torch.levels import transforms_active
from scoped_fn._trace import NotDerivableError

Tensors = Sequence[torch.Tensor]
Results = tuple[Tensors, Tensors | None]


@dataclass(eq=False, slots=True)
class Job:
    """A function of the first tensors, and perhaps another way to compute its values.

    Attributes:
        pure: Returns the function; derivatives and batched versions are derived from it.
        count: How many tensors it takes.
        random: Whether it draws random numbers, so that a vmap level concerns it in any case.
        value: What computes its results where nothing is to be derived any more; None for the function's own code.
        halves: The halves whose forward `value` is; its results are followed by saved tensors.
        above: The same, where a vmap level has been peeled since, so that their backward does not fit.
    """

    pure: Callable[[], Pure]
    count: int
    random: bool
    value: Value | None = None
    halves: Halves | None = None
    above: Halves | None = None

    def launch(self, tensors: Tensors) -> Results:
        """Returns the results for plain tensors, and what was saved if `value` saves something."""
        if self.value is None:
            return self.pure().launch(tensors[: self.count]), None
        results = self.value.launch([tensors[i] for i in self.value.arguments])
        halves = self.halves or self.above
        if halves is None:
            return results, None
        return results[: halves.num_results], results[halves.num_results :]

    def without_value(self) -> Job:
        """Returns the same job, by the function's own code."""
        return Job(self.pure, self.count, self.random)

    def run_eager(self, tensors: Tensors, reason: Exception) -> Results:
        """Runs the function itself, operation by operation, under the levels that there are: right, not compiled."""
        try:
            return self._run_eager(tensors, reason), None
        except NotDerivableError as error:
            raise CaptureError(
                f"Expected a function that runs under this transform, got: {error}. Check that eager runs it."
            ) from error

    def _run_eager(self, tensors: Tensors, reason: Exception) -> Tensors:
        pure = self.pure()
        plain = transforms_active() is None and not forward_mode_active()
        run = pure.by_autograd if plain and pure.by_autograd is not None else pure.run
        results = list(run(*tensors[: self.count]))
        pure.shop.memo.eager_calls += 1
        why = str(reason).strip().splitlines()
        warnings.warn(
            f"Expected {pure.shop.name} to stay compiled under this transform, got a part that runs eager: "
            f"{why[0] if why else type(reason).__name__}. The result is right; cache_info().eager_calls counts them.",
            stacklevel=2,
        )
        return results
