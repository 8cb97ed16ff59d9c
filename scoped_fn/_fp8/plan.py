"""What a captured graph in FP8 takes from the state and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from scoped_fn._errors import SpecError
from scoped_fn.kernels import MatmulRule, Quantizer
from scoped_fn.recipes import CustomRecipe, DelayedScalingRequest
from scoped_fn.state import AutocastScope

ROLES = ("input", "weight", "grad_output")
# No buffer can have such names: a module has no part without a name.
AMAX, SINK, SCALE = ".fp8.amax", ".fp8.grad_sink", ".fp8.scale"
SITE = "fp8_site"  # where the call of a site keeps its name, among the metadata of its node
Column = tuple[str, str]
Weights = tuple[tuple[str, int, str], ...]


class ScopeKey(NamedTuple):
    """What makes code for one scope differ from code for another; part of the structure of a call's arguments.

    Attributes:
        scope: The scope, without what concerns the update of scales alone.
        columns: The columns whose scales the code takes.
        weights: Sites whose weights come quantized, how many tensors each of them is, and how it was quantized.
    """

    scope: AutocastScope
    columns: tuple[Column, ...]
    weights: Weights = ()

    @property
    def extras(self) -> int:
        """How many tensors follow the inputs: scales and sinks, then quantized weights."""
        return (2 if self.columns else 0) + sum(count for _, count, _ in self.weights)


def scope_key(scope: AutocastScope, columns: tuple[Column, ...], weights: Weights = ()) -> ScopeKey:
    """Returns the key of a scope."""
    skip = tuple(sorted(set(scope.skip)))
    plain = replace(scope, recipe=scope.recipe.graph_part, group=None, skip=skip, enabled=True)
    return ScopeKey(plain, columns, weights)


def check_weights(weights: Weights, rules: Mapping[str, MatmulRule]) -> None:
    """Raises `SpecError` if a weight was quantized in another way than its site wants."""
    for site, _, quantizer in weights:
        if site in rules and str(rules[site].weight) != quantizer:
            raise SpecError(
                f"Expected the weight of {site!r} quantized as '{rules[site].weight}', got '{quantizer}': the recipe "
                "is another one. Quantize the weights again under this scope."
            )


@dataclass(frozen=True)
class Fp8Plan:
    """The sites of a captured graph.

    Attributes:
        rules: Site -> how its matmul is computed.
        request: What the scales are updated by, where a custom recipe asks for delayed scaling.
    """

    rules: Mapping[str, MatmulRule]
    request: Any = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that it needs: sites times roles that are scaled by history."""
        return tuple((site, role) for site, rule in self.rules.items() for role in delayed_roles(rule))


def delayed_roles(rule: MatmulRule) -> tuple[str, ...]:
    """Returns the roles whose scales come from the state."""
    quantizers = zip(ROLES, (rule.input, rule.weight, rule.grad_output), strict=True)
    return tuple(role for role, quantizer in quantizers if quantizer.kind == "delayed")


def plan_of(scope: AutocastScope, kinds: Mapping[str, str]) -> Fp8Plan:
    """Returns the plan for sites of these kinds, by name.

    Raises:
        SpecError: A custom recipe answers with something else, or its requests differ.
    """
    recipe = scope.recipe
    if not isinstance(recipe, CustomRecipe):
        rules = {name: recipe.rule(kind, name) for name, kind in kinds.items()}
        return Fp8Plan(_calibrating(rules, scope))
    rules, requests = {}, []
    for name, kind in kinds.items():
        answers = recipe.answers(kind, name)
        requests += [answer for answer in answers if isinstance(answer, DelayedScalingRequest)]
        x, w, dy = (_quantizer(answer, role, name) for answer, role in zip(answers, ROLES, strict=True))
        rules[name] = MatmulRule(x, w, dy, (True, False, False), recipe.backward_override or "quantized")
    if len(set(requests)) > 1:
        raise SpecError(
            f"Expected all DelayedScalingRequests of a CustomRecipe to agree, got {requests[0]} and "
            f"{next(r for r in requests if r != requests[0])}. Answer with equal ones."
        )
    return Fp8Plan(_calibrating(rules, scope), requests[0] if requests else None)


def _calibrating(rules: dict[str, MatmulRule], scope: AutocastScope) -> dict[str, MatmulRule]:
    return {name: replace(rule, calibrating=True) for name, rule in rules.items()} if scope.calibrating else rules


def _quantizer(answer: Any, role: str, name: str) -> Quantizer:
    if isinstance(answer, DelayedScalingRequest):
        dtype = answer.fp8_format.backward_dtype if role == "grad_output" else Quantizer("delayed").dtype
        return Quantizer("delayed", dtype)
    if not isinstance(answer, Quantizer) or answer.kind == "delayed":
        raise SpecError(
            f"Expected qfactory to answer with a kernels.Quantizer or a DelayedScalingRequest for {role} of {name!r}, "
            f"got {answer!r}. Quantizer('none') keeps it in high precision."
        )
    return answer
