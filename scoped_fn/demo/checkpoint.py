"""Training runs on disk: files of `scoped_fn.save`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import scoped_fn as sf
from scoped_fn.demo.adamw import Tensors
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.saved_run import SavedRun, content_of, run_of, settings_of
from scoped_fn.demo.train import Carry


def save_checkpoint(carry: Carry, options: TrainOptions) -> None:
    """Writes the run to the file of ``--checkpoint`` or ``--resume``, where one is given.

    The file changes in one move or not at all.
    """
    if options.saves_to is not None:
        sf.save(content_of(carry, options), options.saves_to)


def load_checkpoint(options: TrainOptions) -> SavedRun | None:
    """Returns the run of ``--resume``, or of ``--checkpoint`` where there is such a file already, or None.

    Raises:
        UsageError: The file is no such checkpoint, or was made with another seed, batch, recipe or model.
    """
    path, option = (options.resume, "--resume") if options.resume else (options.checkpoint, "--checkpoint")
    if path is None or (option == "--checkpoint" and not path.exists()):
        return None
    saved = _read(path, option)
    ours = settings_of(options)
    differing = [name for name in ours if saved.settings.get(name) != ours[name]]
    if differing:
        expected = " ".join(f"--{name} {saved.settings.get(name)}" for name in differing)
        got = " ".join(f"--{name} {ours[name]}" for name in differing)
        raise UsageError(f"Expected {expected} as in '{path}', got {got}. Give the same or another {option}.")
    return saved


def resume(carry: Carry, saved: SavedRun) -> Carry:
    """Returns the saved run on the compiler state of `carry`, which has the owners and passes of this run.

    Raises:
        UsageError: It is a run of another model: its parameters or scales have other names or shapes.
    """
    for ours, theirs in ((carry.params, saved.params), *_moments(carry, saved)):
        if _forms(ours) != _forms(theirs):
            raise UsageError(
                f"Expected {len(ours)} parameters of this model in the checkpoint, got {len(theirs)} others. "
                "Give another file."
            )
    params = {name: saved.params[name] for name in carry.params}
    return Carry(_with_leaves(carry.state, saved.state), params, saved.moments, saved.losses)


def _read(path: Path, option: str) -> SavedRun:
    try:
        saved = run_of(sf.load(path, device="cpu"))
    except sf.CheckpointError as error:
        raise _refusal(path, str(error)) from error
    except OSError as error:
        raise _refusal(path, f"{error.strerror}. Give another {option}.") from None
    if saved is None:
        raise _refusal(path, f"It holds something else. Give another {option}.")
    return saved


def _moments(carry: Carry, saved: SavedRun) -> tuple[tuple[Tensors, Tensors], ...]:
    return (carry.moments.mean, saved.moments.mean), (carry.moments.square, saved.moments.square)


def _forms(tensors: Tensors) -> dict[str, object]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def _with_leaves(state: sf.CompilerState, saved: sf.CompilerState) -> sf.CompilerState:
    """Returns the state with the key, buffers and scales of a saved one; inputs for a profile are not part of a run."""
    ours, theirs = ([held.columns for held in each.fp8.values()] for each in (state, saved))
    if ours != theirs:
        raise UsageError(
            f"Expected scales of the {sum(map(len, ours))} columns of this model in the checkpoint, got those of "
            f"{sum(map(len, theirs))} others. Give another file."
        )
    kept = replace(saved, inputs=state.inputs)
    try:
        return sf.from_tensors(state, sf.to_tensors(kept))
    except sf.SpecError as error:
        raise UsageError(f"Expected a checkpoint of this model, got another: {error} Give another file.") from error


def _refusal(path: Path, reason: str) -> UsageError:
    return UsageError(f"Expected a checkpoint of scoped-fn train, got '{path}'. {reason}")
