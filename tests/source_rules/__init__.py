"""Rules about source text. Each takes a path from the root and the text, and gives what breaks it, a line each."""

from collections.abc import Callable

from tests.source_rules.foreign import foreign_assignment_rule
from tests.source_rules.imports import import_rule
from tests.source_rules.module_state import module_state_rule
from tests.source_rules.private_torch import private_torch_rule

__all__ = ["RULES", "Rule", "foreign_assignment_rule", "import_rule", "module_state_rule", "private_torch_rule"]

Rule = Callable[[str, str], list[str]]
RULES: tuple[Rule, ...] = (import_rule, private_torch_rule, foreign_assignment_rule, module_state_rule)
