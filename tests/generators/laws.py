"""Laws, and the generators whose values each must hold for. `tests/test_laws.py` runs every pair once.

To add a law, write a function of one generated value that asserts, and put it into `LAWS` with the names of generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.generators import laws_of_operations as operations
from tests.generators import laws_of_trees as trees
from tests.generators.operations import HISTORIES, OPERATIONS, STATES
from tests.generators.trees import TREES, TREES_WITH_NONE

GENERATORS: dict[str, st.SearchStrategy[Any]] = {
    "trees": TREES,
    "trees with None": TREES_WITH_NONE,
    "states": STATES,
    "histories": HISTORIES,
    "operations": st.tuples(STATES, OPERATIONS),
}
ALL_TREES = ("trees", "trees with None", "states")


@dataclass(frozen=True)
class Law:
    """Something that holds for every value of some generators.

    Attributes:
        name: What it says.
        of: The generators, by name.
        check: Asserts it of one value.
    """

    name: str
    of: tuple[str, ...]
    check: Callable[[Any], None]


LAWS = (
    Law("optree gives back what it took apart", ALL_TREES, trees.by_optree),
    Law("torch gives back what it took apart", ALL_TREES, trees.by_torch),
    Law("JAX gives back what it took apart", ALL_TREES, trees.by_jax),
    Law("optree and JAX see the same leaves in one order", ALL_TREES, trees.registries_agree),
    Law("torch sees the same leaves", ALL_TREES, trees.torch_has_the_same_leaves),
    Law("the map of the identity is the identity", ALL_TREES, trees.map_of_identity),
    Law("the map of a composition is that of the maps", ("trees", "states"), trees.map_of_a_composition),
    Law("copies are equal", ALL_TREES, trees.travels),
    Law("pickles are equal", ("states",), trees.pickles),
    Law("what is saved is loaded", ("states",), trees.saves),
    Law("tree_equal is an equivalence", ALL_TREES, trees.equal_to_itself),
    Law("tree_equal sees every leaf", ("trees", "states"), trees.other_leaf_other_tree),
    Law("tree_equal never raises", ALL_TREES, trees.never_raises),
    Law("an operation leaves its state untouched", ("operations",), operations.leaves_its_state_untouched),
    Law("an operation gives the same again", ("operations",), operations.gives_the_same_again),
    Law("nothing changed gives the very state", ("operations",), operations.nothing_changed_is_the_very_state),
    Law("an operation is about one owner", ("operations",), operations.others_keep_their_very_tensors),
    Law("a sequence gives the same again", ("histories",), operations.a_twin_goes_the_same_way),
    Law("old states stay", ("histories",), operations.old_states_stay),
    Law("release undoes acquire", ("states",), operations.acquire_then_release),
    Law("releasing all leaves what is nobody's", ("states",), operations.releasing_all_leaves_what_is_nobodys),
    Law("releases commute", ("states",), operations.order_of_releases_does_not_matter),
    Law("the next key is a split", ("states",), operations.keys_follow_one_another),
)
