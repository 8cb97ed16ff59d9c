"""`Root`: a captured graph as the function that everything else is derived from."""

from __future__ import annotations

from dataclasses import replace

import torch

from scoped_fn._ambient import Ambient
from scoped_fn._chain import compile_training
from scoped_fn._graph import draws_anywhere
from scoped_fn._live import Live
from scoped_fn._overrides import known_overrides
from scoped_fn._plan import Plan
from scoped_fn._pure import Pure, Shop
from scoped_fn._replay import make_replay, says_everything, uses_forward_mode
from scoped_fn._runtime import Memo
from scoped_fn._specs import TensorSpec
from scoped_fn._torch.flat import Flat, differentiable_flat
from scoped_fn._torch.levels import apart
from scoped_fn._trace import NotDerivableError, first_rules_are_all, probe
from scoped_fn._training import TrainingCode, training_code
from scoped_fn.passes.graph_pass import identity
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.live_code import refuse_draws_in_regions
from scoped_fn.stages.lower import Inference, lower_inference


class Root(Pure):
    """The captured graph; its arguments are all of its placeholders, constants included.

    Attributes:
        captured: The graph.
        plan: How to compile.
        new_buffers: Names of the buffers that follow the model's own results.
        ambient: Makes the torch settings of the capture hold.
    """

    def __init__(self, captured: Captured, plan: Plan, memo: Memo, ambient: Ambient) -> None:
        self.captured, self.plan, self.ambient = captured, plan, ambient
        lowered = (
            self._lowered() if captured.source.buffers or captured.new_buffers or captured.rng == "torch" else None
        )
        self.new_buffers = lowered.new_buffers if lowered else ()
        random = lowered is not None and draws_anywhere(lowered.graph.gm)
        overrides = known_overrides(plan.settings, captured.owner)
        shop = Shop(captured.source.name, plan.backend, random, memo, overrides)
        specs = [replace(spec, requires_grad=False) for spec in captured.specs]
        params, buffers = len(captured.source.params), len(captured.source.buffers)
        dual = uses_forward_mode(captured.graph.gm)
        super().__init__(self._function(specs, dual), specs, shop, range(params, params + buffers), dual=dual)

    def _function(self, specs: list[TensorSpec], dual: bool) -> Flat:
        """Returns the graph as a function, or the model's own code where the graph does not say everything."""
        captured = self.captured
        replay = make_replay(captured, self.new_buffers, self.ambient)
        if says_everything(captured.graph.gm) or self.plan.passes.captured is not identity or captured.fp8:
            return replay
        refuse_draws_in_regions(captured)
        constants = len(captured.constants)
        live = Live(captured.source, captured.in_structure, constants, self.new_buffers, self.ambient)
        wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
        try:
            probe(lambda *tensors: differentiable_flat(live, tensors, wanted), specs, dual=dual)
        except NotDerivableError:  # functions in the older style, which torch.func refuses
            return replay if first_rules_are_all(live, specs, wanted) else live
        return live

    def _lowered(self) -> Inference:
        with apart(), torch.no_grad(), self.ambient.restored():
            return lower_inference(self.plan.settings, self.captured)[1]

    def training(self, wanted: tuple[int, ...]) -> TrainingCode | None:
        """Returns code of forward and backward, compiled as for plain autograd, and shared with it where that exists.

        None if no output depends on a wanted argument.
        """
        captured, memo = self.captured, self.shop.memo
        specs = tuple(replace(s, requires_grad=i in wanted) for i, s in enumerate(self.specs))
        at = captured.num_held - len(captured.constants)
        without_constants = (*specs[:at], *specs[captured.num_held :])
        for variant in memo.variants:
            constants = self.plan.settings.constants
            if variant.training and variant.serves(self.ambient, captured.in_structure, without_constants, constants):
                return variant.training
        with apart(), torch.inference_mode(False), torch.enable_grad(), self.ambient.restored():
            _, pieces = compile_training(self.plan.settings, replace(captured, specs=specs), self.plan)
        if pieces is None:
            return None
        memo.compiled_graphs += 2
        return training_code(pieces, memo)
