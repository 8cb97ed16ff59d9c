"""`CompilerState` as a pytree of JAX."""

from __future__ import annotations

from typing import Any

import optree

from scoped_fn.state import CompilerState, init_state
from scoped_fn.state.compiler_state import NAMESPACE


def register_jax() -> None:
    """Registers `CompilerState` with `jax.tree_util`; a second call does nothing.

    From then on `jax.jit`, `jax.tree.map`, `jax.lax.scan` and chex see the leaves of a state: arrays, in the order in
    which optree sees its tensors. The rest is structure, and compares by value.

    Example:
        >>> import jax, scoped_fn as sf
        >>> from scoped_fn.interop import torch_to_jax
        >>> register_jax()
        >>> state = torch_to_jax(sf.init_state(key=7))
        >>> jax.jit(lambda state: state.key + 1)(state)
        Array([1, 8], dtype=uint32)
    """
    import jax

    example = init_state()
    if not jax.tree_util.all_leaves([example]):
        return
    build = _one_level(example)[3]
    try:
        jax.tree_util.register_pytree_with_keys(
            CompilerState, _flatten_with_keys, lambda static, children: build(static, list(children)), _flatten
        )
    except ValueError:
        if jax.tree_util.all_leaves([example]):  # else another thread was faster
            raise


def _flatten(state: CompilerState) -> tuple[tuple[Any, ...], Any]:
    children, static, _, _ = _one_level(state)
    return tuple(children), static


def _flatten_with_keys(state: CompilerState) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    import jax

    children, static, names, _ = _one_level(state)
    keys = [jax.tree_util.GetAttrKey(name) for name in names]
    return tuple(zip(keys, children, strict=True)), static


def _one_level(state: Any) -> tuple[Any, ...]:
    """Returns children, static part, names of the children, and what builds a state, as optree is told them."""
    return optree.tree_flatten_one_level(state, namespace=NAMESPACE)
