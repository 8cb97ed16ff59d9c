"""`quantize_weights`: parameters that are quantized once for many calls."""

from __future__ import annotations

import pytest
import torch

import scoped_fn as sf
from tests.fp8.scoped import NETWORKS, example, newest, scales, trained
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_a_step_with_cached_weights_has_the_bits_of_a_step(name: str, kind: str) -> None:
    run, data = example(kind, name)
    run, _ = trained(run, data[:2])
    step = sf.value_and_grad(run.fn)
    plain_state, (loss, grads) = step(run.state, run.params, *data[2])
    state, weights = sf.quantize_weights(run.state, run.fn, run.params)
    assert set(weights) == set(run.params)
    state, (value, slopes) = step(state, weights, *data[2])
    assert_same(value, loss)
    assert_same({key: slopes[key] for key in run.params}, grads)
    if kind == "delayed":
        assert scales(state) == scales(plain_state)


def test_the_amaxes_of_weights_are_staged_once() -> None:
    run, data = example()
    run, _ = trained(run, data[:1])
    state, weights = sf.quantize_weights(run.state, run.fn, run.params)
    for site, roles in newest(state).items():
        assert roles["weight"] == run.params[f"{site}.weight"].abs().max()
        assert roles["input"] == newest(run.state)[site]["input"]
    step = sf.value_and_grad(run.fn)
    state, _ = step(state, weights, *data[1])
    later, _ = step(state, weights, *data[2])
    for site, roles in scales(later).items():
        assert roles["weight"] == scales(state)[site]["weight"], "no amax of a weight: its column stays"
        assert roles["input"] != scales(state)[site]["input"]


def test_cached_weights_do_not_follow_the_parameters() -> None:
    run, data = example()
    _, weights = sf.quantize_weights(run.state, run.fn, run.params)
    expected = run.fn(run.state, run.params, *data[0])[1]
    with torch.no_grad():
        for name in ("net.0.weight", "net.2.weight"):
            run.params[name].zero_()
    assert_same(run.fn(run.state, weights, *data[0])[1], expected)
    assert not torch.equal(run.fn(run.state, run.params, *data[0])[1], expected)
