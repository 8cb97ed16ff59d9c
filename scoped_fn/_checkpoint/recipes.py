"""Recipes and scopes of FP8 as JSON and back, by a list of names: no class but these is ever made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from scoped_fn import recipes
from scoped_fn._checkpoint.plain import Document, described, pairs_of, plain_document, plain_value, tag_of
from scoped_fn._checkpoint.unfit import demand, refusal
from scoped_fn._errors import SpecError
from scoped_fn.state import AutocastScope

KINDS = (
    recipes.DelayedScaling,
    recipes.DelayedScalingRequest,
    recipes.Float8CurrentScaling,
    recipes.Float8BlockScaling,
    recipes.MXFP8BlockScaling,
    recipes.NVFP4BlockScaling,
)
BY_NAME: Mapping[str, type[Any]] = MappingProxyType({kind.__name__: kind for kind in KINDS})
TUPLES: Mapping[str, type[Any]] = MappingProxyType({"MMParams": recipes.MMParams, "QParams": recipes.QParams})
SCOPE_FIELDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "recipe": lambda value: value is None or type(value) in BY_NAME.values(),
        "enabled": lambda value: type(value) is bool,
        "calibrating": lambda value: type(value) is bool,
        "skip": lambda value: type(value) is tuple and all(isinstance(each, str) for each in value),
        "group": lambda value: value is None or isinstance(value, str),
        "sites": lambda value: value in ("parameters", "all"),
    }
)
NO_FUNCTIONS = "A file holds no functions. End the scope first (sf.end_autocast) and open it again after loading."


def recipe_document(recipe: Any, path: str) -> Document:
    """Returns a recipe as JSON; raises `Unfit` for one that holds a function."""
    name = type(recipe).__name__
    if type(recipe) not in KINDS:
        raise refusal(f"a recipe without functions of your own at {path}", described(recipe), NO_FUNCTIONS)
    named = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return {name: [[field, _field_document(value, f"{path}.{field}")] for field, value in named.items()]}


def recipe_value(document: Document) -> Any:
    """Returns the recipe that JSON stands for, checked by its own constructor."""
    name, content = tag_of(document)
    demand(name in BY_NAME, "the name of a recipe", document)
    pairs = pairs_of(content, "fields of a recipe")
    fields_once = all(isinstance(field, str) for field, _ in pairs) and len(dict(pairs)) == len(pairs)
    demand(fields_once, "fields of a recipe, each once", content)
    return _made(BY_NAME[name], {field: _field_value(value) for field, value in pairs})


def scope_document(scope: AutocastScope, path: str) -> Document:
    """Returns a scope as JSON."""
    recipe = None if scope.recipe is None else recipe_document(scope.recipe, path)
    rest = {name: plain_document(getattr(scope, name), path) for name in SCOPE_FIELDS if name != "recipe"}
    return {"recipe": recipe, **rest}


def scope_value(document: Document) -> AutocastScope:
    """Returns the scope that JSON stands for."""
    well = isinstance(document, dict) and document.keys() == SCOPE_FIELDS.keys()
    demand(well, f"a scope with {', '.join(SCOPE_FIELDS)}", document)
    recipe = None if document["recipe"] is None else recipe_value(document["recipe"])
    given = {"recipe": recipe, **{n: plain_value(part) for n, part in document.items() if n != "recipe"}}
    for name, check in SCOPE_FIELDS.items():
        demand(check(given[name]), f"a scope's {name}", given[name])
    demand(recipe is not None or not (given["enabled"] or given["calibrating"]), "a recipe in a scope", None)
    return AutocastScope(**given)


def _field_document(value: Any, path: str) -> Document:
    if isinstance(value, recipes.Format):
        return {"Format": value.name}
    for name, kind in TUPLES.items():
        if type(value) is kind:
            return {name: [plain_document(part, path) for part in value]}
    if callable(value):
        raise refusal(f"a recipe without functions of your own, got one with a function at {path}", value, NO_FUNCTIONS)
    return plain_document(value, path)


def _field_value(document: Document) -> Any:
    name, content = tag_of(document)
    if name == "Format":
        demand(isinstance(content, str) and content in recipes.Format.__members__, "the name of a format", content)
        return recipes.Format[content]
    if name not in TUPLES:
        return plain_value(document)
    kind = TUPLES[name]
    parts = [plain_value(part) for part in content] if isinstance(content, list) else []
    demand(len(parts) == len(kind._fields), f"the {len(kind._fields)} fields of {name}", content)
    return _made(kind, dict(zip(kind._fields, parts, strict=True)))


def _made(kind: type[Any], given: Mapping[Any, Any]) -> Any:
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    demand(sorted(map(str, given)) == sorted(names), f"the fields of {kind.__name__}", list(given))
    for name, value in given.items():
        demand(_fits(value, hints[name]), f"a value of {kind.__name__}.{name}", value)
    try:
        return kind(**given)
    except SpecError as error:
        raise refusal(f"fields that {kind.__name__} takes", str(error)) from None


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)
