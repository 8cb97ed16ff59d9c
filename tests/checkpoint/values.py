"""What is saved in the tests, drawn at random too, and what two equal values share and no others do."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

import scoped_fn as sf
from scoped_fn.state import set_buffers
from scoped_fn.state.fp8_state import init_fp8, tensors_of
from scoped_fn.state.input_queue import queue_static, queue_tensors
from tests.generators.arrays import bits
from tests.generators.operations import AUTOTUNE, LIMIT
from tests.state.whole import BUDGET

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip


def exact(value: Any) -> Any:
    """A value as nested tuples that are equal for values of the same types, order and bits."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), str(value.device), bits(value).tobytes()
    if isinstance(value, sf.CompilerState):
        return "state", *exact_state(value)
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact(part) for part in value]
    return type(value), value.hex() if isinstance(value, float) else repr(value)


def exact_state(state: sf.CompilerState) -> tuple[Any, ...]:
    """The parts of a state as `exact` gives them; order counts."""
    static = [repr(part) for part in (state.owners, state.autocast, state.overrides, state.constants)]
    buffers = [(token, exact(dict(named))) for token, named in state.buffers.items()]
    fp8 = [(token, held.columns, repr(held.recipe), exact(tensors_of(held))) for token, held in state.fp8.items()]
    inputs = [(token, queue_static(queue), exact(queue_tensors(queue))) for token, queue in state.inputs.items()]
    return static, state.next_token, buffers, fp8, inputs, exact(state.key)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes."""
    item = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    made = torch.randint(0, 256, (count * item,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (made % 2).bool().reshape(shape) if dtype == torch.bool else made.view(dtype).reshape(shape)


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.builds(tensor_of, st.sampled_from(DTYPES), SHAPES, st.integers(0, 9))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
)
KEYS = st.one_of(st.text(st.sampled_from("ab.#"), max_size=3), st.integers(-3, 3), st.booleans(), st.none())


def _containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(parts, max_size=3)
    dicts = st.dictionaries(KEYS, parts, max_size=3)
    return st.one_of(lists, lists.map(tuple), dicts, dicts.map(OrderedDict))


RECIPES = st.one_of(
    st.builds(
        sf.DelayedScaling,
        margin=st.integers(-127, 149),
        fp8_format=st.sampled_from([sf.Format.HYBRID, sf.Format.E4M3]),
        amax_history_len=st.integers(1, 5),
        amax_compute_algo=st.sampled_from(["max", "most_recent"]),
        reduce_amax=st.booleans(),
    ),
    st.builds(
        sf.Float8CurrentScaling,
        use_power_2_scales=st.booleans(),
        fp8_quant_fwd_inp=st.one_of(
            st.none(), st.builds(lambda *given: sf.QParams(*given), st.booleans(), st.floats(0, 1))
        ),
        fp8_gemm_dgrad=st.builds(sf.MMParams, st.booleans()),
        backward_override=st.sampled_from([None, "high_precision", "dequantized"]),
    ),
    st.builds(sf.Float8BlockScaling, use_f32_scales=st.booleans(), x_block_scaling_dim=st.just(1)),
    st.builds(sf.MXFP8BlockScaling, margin=st.integers(0, 2)),
    st.builds(sf.NVFP4BlockScaling, disable_rht=st.booleans()),
)
SCOPES = st.builds(
    sf.AutocastScope,
    recipe=RECIPES,
    enabled=st.booleans(),
    calibrating=st.booleans(),
    skip=st.lists(st.sampled_from(["head", "*.norm"]), max_size=2).map(tuple),
    group=st.sampled_from([None, "data"]),
    sites=st.sampled_from(["parameters", "all"]),
)
CONSTANTS = st.recursive(SCALARS, lambda parts: st.lists(parts, max_size=2).map(tuple), max_leaves=4)
INPUTS = st.recursive(
    st.one_of(TENSORS, SCALARS), lambda parts: st.one_of(st.lists(parts, max_size=2), st.tuples(parts)), max_leaves=3
)
COLUMNS = st.lists(
    st.tuples(st.sampled_from(["0", "blocks.1.attn"]), st.sampled_from(["input", "weight", "grad_output"])),
    unique=True,
    max_size=5,
)


@st.composite
def states(draw: st.DrawFn) -> sf.CompilerState:
    """A state with up to three owners, and anything else."""
    state = sf.init_state(key=draw(st.integers(0, 2**64 - 1)))
    for name in draw(st.lists(st.sampled_from(["encoder", "decoder", "a.b"]), max_size=3)):
        state, token = sf.acquire(state, name)
        state = _furnished(draw, state, token)
    if state.owners and draw(st.booleans()):
        state = sf.release(state, next(iter(state.owners)))
    for name, value in draw(st.dictionaries(st.text(max_size=3), CONSTANTS, max_size=2)).items():
        state = sf.set_constant(state, name, value)
    return replace(state, autocast=tuple(draw(st.lists(SCOPES, max_size=2))))


def _furnished(draw: st.DrawFn, state: sf.CompilerState, token: int) -> sf.CompilerState:
    if draw(st.booleans()):
        names = st.sampled_from(["mean", "layer.mean", "scale", "#2"])
        state = set_buffers(state, token, draw(st.dictionaries(names, TENSORS, max_size=3)))
    if draw(st.booleans()):
        held = init_fp8(draw(COLUMNS), draw(RECIPES.filter(lambda recipe: recipe.delayed is not None)))
        held = replace(held, scale=held.scale * 3, amax_history=held.amax_history + 0.1)
        state = replace(state, fp8=state.fp8.set(token, held))
    for key, value in ((AUTOTUNE, True), (LIMIT, token), (BUDGET, 0.3)):
        if draw(st.booleans()):
            state = sf.set_override(state, token, key, value)
    for _ in range(draw(st.integers(0, 2))):
        state, _ = sf.open_frame(state, token)
    for given in draw(st.lists(st.lists(INPUTS, max_size=2).map(tuple), max_size=2)):
        kwargs = {"more": given} if draw(st.booleans()) else None
        state = sf.push_inputs(state, token, given, kwargs, keep_integers=draw(st.booleans()))
    return state


VALUES = st.recursive(st.one_of(SCALARS, TENSORS, states()), _containers, max_leaves=6)
