"""`Engine`: a compiled model for people with PyTorch habits; the only object that keeps a state and changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from scoped_fn._autocast import autocast
from scoped_fn._backends import Backend
from scoped_fn._compile import compile
from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._scales import update_scales
from scoped_fn._sinks import stage_gradients, watch_gradients
from scoped_fn.recipes import Recipe
from scoped_fn.state import CompilerState, Fp8State, init_state, set_buffers

FP8_KEYS = ("fp8.scale", "fp8.amax_history", "fp8.columns")


class Engine(nn.Module):
    """A module that runs a model compiled, with a state inside.

    Call it like the model, then `loss.backward()`, `optimizer.step()` and, with a recipe that keeps a history,
    `engine.end_step()`. Two engines share nothing. Other models of one state: use `compile`.

    Args:
        model: The model. Its parameters are the engine's own, its buffers are kept up to date.
        inputs: Example inputs, a tuple.
        kwargs: Example keyword arguments.
        recipe: A recipe for FP8 autocast; None leaves the scopes of `state` as they are.
        skip: Names of layers that stay in high precision.
        backend: As in `compile`.
        state: A state to begin with; a new one by default.

    Example:
        >>> import torch, scoped_fn as sf
        >>> model = torch.nn.Linear(8, 4)
        >>> engine = sf.Engine(model, (torch.ones(2, 8),), recipe=sf.DelayedScaling(), backend="eager")
        >>> engine(torch.ones(2, 8)).sum().backward()
        >>> engine.end_step()
        >>> sf.describe_fp8(engine.state)["Linear"]["input"]["scale"]
        448.0
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        recipe: Recipe | None = None,
        skip: Sequence[str] = (),
        backend: Backend = "inductor",
        state: CompilerState | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise SpecError(f"Expected a torch.nn.Module, got a {type(model).__name__}. For functions use sf.compile.")
        state = init_state() if state is None else state
        state = state if recipe is None else autocast(state, recipe, skip=skip)
        self.model = model
        self.training = model.training
        self._backend = backend
        self._example = (inputs, kwargs)
        self._functions: dict[bool, CompiledFn] = {}
        self.state, self._functions[model.training] = compile(state, model, inputs, kwargs, backend=backend)

    @property
    def fn(self) -> CompiledFn:
        """The compiled function of the mode that the model is in, training or evaluation."""
        mode = self.model.training
        if mode not in self._functions:
            inputs, kwargs = self._example
            state, made = compile(self.state, self.model, inputs, kwargs, backend=self._backend)
            self.state, self._functions[mode] = self._with_scales(state, made), made
        return self._functions[mode]

    def _with_scales(self, state: CompilerState, fn: CompiledFn) -> CompilerState:
        """Returns the state in which a function of another mode has the scales that the engine has by now."""
        held = next((state.fp8[f.owner] for f in self._functions.values() if f.owner in state.fp8), None)
        return state if held is None else replace(state, fp8=state.fp8.set(fn.owner, held))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns; amaxes are recorded where gradients are wanted."""
        fn = self.fn
        state = self._with_buffers(fn)
        others = [f.owner for f in self._functions.values() if f is not fn]
        if torch.is_grad_enabled():
            state, sinks = watch_gradients(state)
            for owner, sink in sinks.items():
                if owner == fn.owner:
                    sink.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda sink, owner=owner: self._stage(owner, sink)
                    )
        after, out = fn(state, dict(self.model.named_parameters()), *args, **kwargs)
        self.state = stage_gradients(after, {owner: held.grad_sink.detach() for owner, held in after.fp8.items()})
        self._share(fn.owner, others)
        self._write_buffers(fn)
        return out

    def _stage(self, owner: int, sink: torch.Tensor) -> None:
        """Takes the amaxes of gradients from a backward that ran just now."""
        if owner in self.state.fp8:
            self.state = stage_gradients(self.state, {owner: sink})
            self._share(owner, [f.owner for f in self._functions.values() if f.owner != owner])

    def _share(self, owner: int, others: Sequence[int]) -> None:
        """Gives the functions of other modes the same scales."""
        fp8 = self.state.fp8
        if owner in fp8 and others:
            for other in others:
                fp8 = fp8.set(other, fp8[owner])
            self.state = replace(self.state, fp8=fp8)

    def _with_buffers(self, fn: CompiledFn) -> CompilerState:
        buffers = fn.captured.source.buffers
        if not buffers:
            return self.state
        now = dict(self.model.named_buffers())
        return set_buffers(self.state, fn.owner, {name: now[name].detach().clone() for name in buffers})

    def _write_buffers(self, fn: CompiledFn) -> None:
        now = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in self.state.buffers.get(fn.owner, {}).items():
                now[name].copy_(value)

    def end_step(self) -> None:
        """Ends a step: FP8 scales follow the amaxes that were recorded since the last one."""
        self.state = update_scales(self.state)

    def train(self, mode: bool = True) -> Engine:
        """Sets the mode of the model, and of the engine."""
        super().train(mode)
        return self

    # A checkpoint has the model's own names, then the FP8 state as tensors whose shapes do not change.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's `state_dict`, with the FP8 scales as tensors of fixed shapes under `fp8.*`."""
        entries = self.model.state_dict(*args, **kwargs)
        held = self.state.fp8.get(self.fn.owner)
        if held is not None:
            text = json.dumps(held.columns).encode()
            columns = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            prefix = kwargs.get("prefix", "")
            values = (held.scale, held.amax_history, columns)
            entries |= {prefix + key: value for key, value in zip(FP8_KEYS, values, strict=True)}
        return entries

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads what `state_dict` gave, or a `state_dict` of the model alone, which leaves the FP8 scales as they are.

        Raises:
            SpecError: The FP8 tensors are of another model or recipe. Nothing has been loaded then.
        """
        entries = dict(state_dict)
        fp8 = {key: entries.pop(key) for key in FP8_KEYS if key in entries}
        state = self._loaded(fp8) if fp8 else self.state
        result = self.model.load_state_dict(entries, strict=strict, assign=assign)
        self.state = state
        return result

    def _loaded(self, fp8: dict[str, torch.Tensor]) -> CompilerState:
        held = self.state.fp8.get(self.fn.owner)
        if held is None or set(fp8) != set(FP8_KEYS):
            raise SpecError(
                f"Expected {', '.join(FP8_KEYS) if held else 'no FP8 scales'} in the state_dict, got {', '.join(fp8)}. "
                "Make the engine with the recipe that the file was saved with."
            )
        saved = [tuple(column) for column in json.loads(bytes(fp8["fp8.columns"].tolist()))]
        _check_loaded(held, saved, fp8)
        order = torch.tensor([saved.index(column) for column in held.columns])
        scale = fp8["fp8.scale"].to(held.scale.device)[order]
        history = fp8["fp8.amax_history"].to(held.scale.device)[:, order]
        new = replace(held, scale=scale, amax_history=history)
        owners = [f.owner for f in self._functions.values()]
        return replace(self.state, fp8=type(self.state.fp8)({**self.state.fp8, **dict.fromkeys(owners, new)}))


def _check_loaded(held: Fp8State, saved: list[Any], fp8: dict[str, torch.Tensor]) -> None:
    shape = (held.recipe.amax_history_len, len(saved))
    if sorted(saved) != sorted(held.columns):
        different = sorted(set(saved) ^ set(held.columns))
        raise SpecError(
            f"Expected FP8 scales of the sites of this engine, got others: {different[0]} is on one side only. "
            "Make the engine with the same model, skip and recipe."
        )
    if tuple(fp8["fp8.amax_history"].shape) != shape or tuple(fp8["fp8.scale"].shape) != shape[1:]:
        raise SpecError(
            f"Expected an amax history of shape {shape}, got {tuple(fp8['fp8.amax_history'].shape)}. "
            f"Make the engine with amax_history_len={len(fp8['fp8.amax_history'])}."
        )
