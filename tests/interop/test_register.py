"""A state inside JAX: jit, map, scan and chex see its leaves."""

from __future__ import annotations

import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest
import torch

import scoped_fn as sf
from scoped_fn.interop import jax_to_torch, register_jax, torch_to_jax
from tests.state.whole import whole_state


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_jax()
    register_jax()  # twice is once


def test_a_state_that_crossed_is_known_to_jax() -> None:
    program = (
        "import jax, scoped_fn as sf\nfrom scoped_fn.interop import torch_to_jax\n"
        "print(jax.tree.leaves(torch_to_jax(sf.init_state(key=7)))[0].tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[0, 7]"


def test_a_state_under_jit() -> None:
    state = torch_to_jax(sf.init_state(key=7))
    after = jax.jit(lambda state: state)(state)
    assert isinstance(after, sf.CompilerState)
    assert after.key.tolist() == [0, 7]
    assert sf.tree_equal(jax_to_torch(after), sf.init_state(key=7))


def test_another_structure_is_another_trace_and_the_same_one_is_not() -> None:
    traces = []

    @jax.jit
    def run(state: sf.CompilerState) -> jax.Array:
        traces.append(state.next_token)
        return state.key

    run(torch_to_jax(sf.init_state(key=1)))
    run(torch_to_jax(sf.init_state(key=2)))
    run(torch_to_jax(sf.acquire(sf.init_state(key=2), "model")[0]))
    assert traces == [0, 1]


def test_a_state_as_carry_of_scan_and_as_a_batch() -> None:
    state = torch_to_jax(sf.set_buffers(*sf.acquire(sf.init_state(), "model"), {"n": torch.zeros(())}))
    after, _ = jax.lax.scan(lambda state, _: (jax.tree.map(lambda x: x + 1, state), None), state, None, length=3)
    assert float(after.buffers[0]["n"]) == 3.0
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    assert jax.vmap(lambda state: state.buffers[0]["n"] + 1)(stacked).tolist() == [1.0, 1.0]


def test_a_state_with_every_part_crosses_and_chex_sees_its_leaves() -> None:
    state = whole_state()
    with jax.enable_x64(True):
        arrays = torch_to_jax(state)
        assert sf.tree_equal(jax_to_torch(jax.jit(lambda state: state)(arrays)), state)
    assert len(jax.tree.leaves(arrays)) == len(sf.state.tree_leaves(state))
    changed = jax.tree.map(jnp.zeros_like, arrays)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(changed, arrays)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal_structs(arrays, torch_to_jax(sf.init_state()))
