"""Rules and quantizers: values that become text and come back."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from scoped_fn.kernels import MatmulRule, Quantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
floats = st.sampled_from([0.0, 1e-6, 1e-12, 0.25])
quantizers = st.one_of(
    st.builds(Quantizer, st.sampled_from(["delayed", "mx"]), st.sampled_from([E4M3, E5M2])),
    st.builds(Quantizer, st.just("current"), st.sampled_from([E4M3, E5M2]), st.booleans(), floats),
    st.builds(
        Quantizer, st.just("blocks"), st.sampled_from([E4M3, E5M2]), st.booleans(), floats, st.sampled_from([1, 128])
    ),
    st.builds(
        Quantizer,
        st.just("nvfp4"),
        block_rows=st.sampled_from([1, 16]),
        hadamard=st.booleans(),
        stochastic=st.booleans(),
    ),
    st.just(Quantizer("none")),
)


@st.composite
def rules(draw: st.DrawFn) -> MatmulRule:
    """Any rule whose operands are transformed alike."""
    x, w, dy = draw(quantizers), draw(quantizers), draw(quantizers)
    assume(not w.hadamard and x.hadamard == dy.hadamard)
    fast = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    backward = draw(st.sampled_from(["quantized", "dequantized", "high_precision"]))
    return MatmulRule(x, w, dy, fast, backward, draw(st.booleans()))


@given(quantizers)
def test_a_quantizer_comes_back_from_its_text(quantizer: Quantizer) -> None:
    assert Quantizer.parse(str(quantizer)) == quantizer


@given(rules())
def test_a_rule_comes_back_from_its_text(rule: MatmulRule) -> None:
    assert MatmulRule.parse(str(rule)) == rule


@given(rules(), rules())
def test_rules_that_differ_have_different_texts(one: MatmulRule, other: MatmulRule) -> None:
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kind": "row"}, "kind"),
        ({"kind": "current", "dtype": torch.float16}, "dtype"),
        ({"kind": "blocks", "block_rows": 16}, "block_rows"),
        ({"kind": "nvfp4", "block_rows": 128}, "block_rows"),
        ({"kind": "current", "epsilon": -1.0}, "epsilon"),
    ],
)
def test_a_wrong_quantizer_is_refused_in_words(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {word} .*got"):
        Quantizer(**options)


@pytest.mark.parametrize(("x", "w", "dy"), [(True, False, False), (False, False, True), (True, True, True)])
def test_operands_that_are_transformed_apart_are_refused_in_words(x: bool, w: bool, dy: bool) -> None:
    with pytest.raises(ValueError, match="Expected hadamard of input and grad_output alike"):
        MatmulRule(*[Quantizer("nvfp4", hadamard=transformed) for transformed in (x, w, dy)])


def test_a_wrong_backward_is_refused_in_words() -> None:
    quantizer = Quantizer("mx")
    with pytest.raises(ValueError, match="Expected backward .*got 'exact'"):
        MatmulRule(quantizer, quantizer, quantizer, backward="exact")
