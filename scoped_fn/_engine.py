"""`Engine`: a compiled model for people with PyTorch habits; the only object that keeps a state and changes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from scoped_fn._backends import Backend
from scoped_fn._compile import AnyPasses, compile
from scoped_fn._compiled import CompiledFn
from scoped_fn._engine_checkpoint import FP8_KEYS, check_loaded, rename_loaded, rename_saved
from scoped_fn._errors import SpecError
from scoped_fn._fp8.results import without_staged
from scoped_fn._fp8.scales import update_scales
from scoped_fn._fp8.scopes import autocast
from scoped_fn._fp8.sinks import lacks_sinks, stage_gradients, watch_gradients
from scoped_fn._guidance import profile
from scoped_fn._open_frame import OpenFrame
from scoped_fn._profile import Profile
from scoped_fn._recompile import advance, recompile
from scoped_fn._schedule import Schedule
from scoped_fn._structure import flatten
from scoped_fn._torch.dual import in_transform
from scoped_fn.passes import Passes
from scoped_fn.recipes import Recipe
from scoped_fn.state import CompilerState, Fp8State, Frame, close_frame, init_state, open_frame, set_buffers


class Engine(nn.Module):
    """A module that runs a model compiled, with a state inside.

    Call it like the model, then `loss.backward()`, `optimizer.step()` and, with a recipe that keeps a history,
    `engine.end_step()`. Two engines share nothing; each is for one thread at a time. Other models of one state: use
    `compile`.

    Args:
        model: The model. Its parameters are the engine's own, its buffers are kept up to date.
        inputs: Example inputs, a tuple.
        kwargs: Example keyword arguments.
        recipe: A recipe for FP8 autocast; None leaves the scopes of `state` as they are.
        skip: Names of layers that stay in high precision.
        backend: As in `compile`.
        state: A state to begin with; a new one by default.
        rng: As in `compile`: "key" or "torch".
        passes: As in `compile`.
        schedule: As in `compile`: passes by step, for `engine.advance(step)`.

    A forward whose result carries gradients opens a frame in the state; the backward closes it, or the end of the last
    result if there is no backward.

    Example:
        >>> import torch, scoped_fn as sf
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> engine = sf.Engine(model, (torch.ones(2, 8),), recipe=sf.DelayedScaling(), backend="eager")
        >>> engine(torch.ones(2, 8)).sum().backward()
        >>> engine.end_step()
        >>> sf.describe_fp8(engine.state)["0"]["input"]["scale"]
        448.0
    """

    _state: CompilerState

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
        rng: str = "key",
        passes: AnyPasses = Passes(),
        schedule: Schedule | None = None,
    ) -> None:
        """Compiles the model for the mode that it is in."""
        super().__init__()
        if isinstance(kwargs, Recipe):
            raise SpecError(f"Expected kwargs as a dict, got {type(kwargs).__name__}. Write recipe=....")
        if not isinstance(model, nn.Module):
            raise SpecError(f"Expected a torch.nn.Module, got a {type(model).__name__}. For functions use sf.compile.")
        state = init_state() if state is None else state
        state = state if recipe is None else autocast(state, recipe, skip=skip)
        self.model = model
        self.training = model.training
        self._options: dict[str, Any] = {"backend": backend, "rng": rng, "passes": passes, "schedule": schedule}
        self._example = (inputs, kwargs)
        self._functions: dict[bool, CompiledFn] = {}
        self._step, self._ended = 0, list[Frame]()
        self._by_hand: AnyPasses | None = None
        self.state, self._functions[model.training] = compile(state, model, inputs, kwargs, **self._options)
        self.register_state_dict_post_hook(rename_saved)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(rename_loaded)  # type: ignore[no-untyped-call]

    @property
    def fn(self) -> CompiledFn:
        """The compiled function of the mode that the model is in, training or evaluation."""
        mode = self.model.training
        if mode not in self._functions:
            inputs, kwargs = self._example
            state, made = compile(self.state, self.model, inputs, kwargs, step=self._step, **self._options)
            if self._by_hand is not None:
                state, made = recompile(state, made, self._by_hand)
            self.state, self._functions[mode] = self._with_scales(state, made), made
        return self._functions[mode]

    @property
    def state(self) -> CompilerState:
        """The state, without the frames whose backward has run or can no longer run.

        You may set it; frames that are open in a state from before a backward stay open.
        """
        while self._ended:
            frame = self._ended.pop()
            held = self._state.owners.get(frame.owner)
            if held is not None and frame.index in held.frames:
                self._state = close_frame(self._state, frame)
        return self._state

    @state.setter
    def state(self, state: CompilerState) -> None:
        self._state = state

    def recompile(self, passes: AnyPasses | None = None) -> None:
        """Compiles once more, with other passes; see `scoped_fn.recompile`."""
        state, made = self.state, {}
        for mode, fn in self._functions.items():
            state, made[mode] = recompile(state, fn, passes)
        self.state, self._functions = state, made
        self._by_hand = passes if passes is not None else self._by_hand

    def advance(self, step: int) -> None:
        """Puts the entry of the schedule in force that is due at a step; see `scoped_fn.advance`."""
        state, made = self.state, {}
        for mode, fn in self._functions.items():
            state, made[mode] = advance(state, fn, step)
        self.state, self._functions, self._step, self._by_hand = state, made, step, None

    def profile(self) -> Profile:
        """Returns what each operation of a call costs; see `scoped_fn.profile`."""
        self.state, found = profile(self.state, self.fn)
        return found

    def _with_scales(self, state: CompilerState, fn: CompiledFn) -> CompilerState:
        """Returns the state in which a function of another mode has the scales that the engine has by now."""
        held = self._held()
        return state if held is None else replace(state, fp8=state.fp8.set(fn.owner, held))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns; amaxes are recorded where gradients are wanted."""
        if in_transform():
            raise SpecError(
                "Expected a call of an Engine outside torch.func transforms, which its state outlives, got one inside. "
                "Transform engine.fn, with a state: engine.fn(engine.state, params, ...)."
            )
        fn, params = self.fn, dict(self.model.named_parameters())
        state = self._with_buffers(fn)
        watched, after, out = self._call(fn, state, params, args, kwargs)
        if lacks_sinks(watched, after):  # a new kind of call: now the columns of its gradients are known
            _, after, out = self._call(fn, without_staged(state, after), params, args, kwargs)
        self.state = stage_gradients(after, {owner: held.grad_sink.detach() for owner, held in after.fp8.items()})
        self._share(fn.owner)
        self._write_buffers(fn)
        self._open_frame(fn, out)
        return out

    def _open_frame(self, fn: CompiledFn, out: Any) -> None:
        nodes = {tensor.grad_fn for tensor in flatten(out, "outputs")[0] if tensor.grad_fn is not None}
        if nodes:
            self.state, frame = open_frame(self.state, fn)
            ended = OpenFrame(self._ended, frame)
            for node in nodes:
                node.register_hook(ended)

    def _call(
        self, fn: CompiledFn, state: CompilerState, params: dict[str, Any], args: Any, kwargs: Any
    ) -> tuple[CompilerState, CompilerState, Any]:
        """Returns the state that went in, with sinks that autograd follows, the one that came out, and the result."""
        if torch.is_grad_enabled():
            state, sinks = watch_gradients(state)
            if fn.owner in sinks:
                sinks[fn.owner].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda sink: self._stage(fn.owner, sink)
                )
        return state, *fn(state, params, *args, **kwargs)

    def _stage(self, owner: int, sink: torch.Tensor) -> None:
        """Takes the amaxes of gradients from a backward that ran just now."""
        if owner in self.state.fp8:
            self.state = stage_gradients(self.state, {owner: sink})
            sink.grad = None  # a second backward through the same graph would be added to it
            self._share(owner)

    def _share(self, owner: int) -> None:
        """Gives the functions of all modes the scales of one."""
        fp8 = self.state.fp8
        if owner in fp8:
            shared = {f.owner: fp8[owner] for f in self._functions.values()}
            self.state = replace(self.state, fp8=type(fp8)({**fp8, **shared}))

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

    def _apply(self, fn: Any, recurse: bool = True) -> Engine:
        """Moves the model; its FP8 scales go to the same device and stay in float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.zeros(1)).device
        fp8 = {owner: held.to(device) for owner, held in self.state.fp8.items()}
        self.state = replace(self.state, fp8=type(self.state.fp8)(fp8))
        return self

    def end_step(self) -> None:
        """Ends a step: FP8 scales follow the amaxes that were recorded since the last one."""
        self.state = update_scales(self.state)

    def train(self, mode: bool = True) -> Engine:
        """Sets the mode of the model, and of the engine."""
        super().train(mode)
        return self

    # A checkpoint has the model's own names, then the FP8 state as tensors whose shapes do not change.

    def get_fp8_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the FP8 scales as `state_dict` holds them; empty where there are none."""
        held = self._held()
        if held is None:
            return {}
        columns = torch.frombuffer(bytearray(json.dumps(held.columns).encode()), dtype=torch.uint8)
        return dict(zip(FP8_KEYS, (held.scale, held.amax_history, columns), strict=True))

    def _held(self) -> Fp8State | None:
        fp8 = self.state.fp8
        return next((fp8[f.owner] for f in self._functions.values() if f.owner in fp8), None)

    def set_fp8_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes what `get_fp8_tensors` gave.

        Raises:
            SpecError: The tensors are of another model or recipe.
        """
        held = self._held()
        if held is None or set(tensors) != set(FP8_KEYS):
            raise SpecError(
                f"Expected {', '.join(FP8_KEYS) if held else 'no FP8 scales'}, got {', '.join(tensors) or 'none'}. "
                "Make the engine with the recipe that the file was saved with."
            )
        saved = [tuple(column) for column in json.loads(bytes(tensors["fp8.columns"].tolist()))]
        check_loaded(held, saved, tensors)
        order = torch.tensor([saved.index(column) for column in held.columns])
        scale, history = (tensors[key].to(held.scale.device) for key in FP8_KEYS[:2])
        new = replace(held, scale=scale[order], amax_history=history[:, order])
        fp8 = {**self.state.fp8, **{f.owner: new for f in self._functions.values()}}
        self.state = replace(self.state, fp8=type(self.state.fp8)(fp8))
