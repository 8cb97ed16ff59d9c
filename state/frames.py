"""Frames: forwards whose backward is still to come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from scoped_fn.state.compiler_state import CompilerState
from scoped_fn.state.owners import OwnershipError, check_owner, renewed, token_of


@dataclass(frozen=True)
class Frame:
    """A forward whose backward is still to come.

    Attributes:
        owner: Token of the function that ran it.
        index: Which of the owner's forwards; counts up.
    """

    owner: int
    index: int


def open_frame(state: CompilerState, owner: Any) -> tuple[CompilerState, Frame]:
    """Returns the state with one more open frame of an owner, and the frame.

    Raises:
        OwnershipError: The state does not hold the owner.

    Example:
        >>> from scoped_fn.state import acquire, close_frame, init_state
        >>> state, owner = acquire(init_state(), "encoder")
        >>> state, frame = open_frame(state, owner)
        >>> frame
        Frame(owner=0, index=0)
        >>> close_frame(state, frame).owners[owner].frames
        ()
    """
    token = check_owner(state, token_of(owner))
    held = state.owners[token]
    state = renewed(state, token, frames=(*held.frames, held.next_frame), next_frame=held.next_frame + 1)
    return state, Frame(token, held.next_frame)


def close_frame(state: CompilerState, frame: Frame) -> CompilerState:
    """Returns the state without an open frame.

    With the last one of an owner go the inputs that were queued while a frame was open; their spec stays.

    Raises:
        OwnershipError: The state does not hold the frame's owner, or the frame is not open in it.
    """
    if not isinstance(frame, Frame):
        raise TypeError(f"Expected a Frame, got a {type(frame).__name__}. Pass what open_frame returned.")
    token = check_owner(state, frame.owner)
    held = state.owners[token]
    if frame.index not in held.frames:
        fate = "was closed before" if 0 <= frame.index < held.next_frame else "was never opened in this state"
        opened = ", ".join(map(str, held.frames)) or "none"
        raise OwnershipError(
            f"Expected an open frame of owner {token} ({held.name}), got frame {frame.index}, which {fate}; "
            f"open: {opened}. Close each frame once, in the states that follow its open_frame."
        )
    left = tuple(index for index in held.frames if index != frame.index)
    state = renewed(state, token, frames=left)
    return state if left or token not in state.inputs else _without_captured(state, token)


def open_frames(state: CompilerState) -> tuple[CompilerState, tuple[Frame, ...]]:
    """Returns the state with one more open frame of every owner, and the frames."""
    frames: list[Frame] = []
    for token in state.owners:
        state, frame = open_frame(state, token)
        frames.append(frame)
    return state, tuple(frames)


def close_frames(state: CompilerState, frames: tuple[Frame, ...]) -> CompilerState:
    """Returns the state without the frames of `open_frames` that are open still.

    They are taken as never opened where none was opened since: a step does not change what its states look like.
    """
    for frame in frames:
        held = state.owners.get(frame.owner)
        if held is None or frame.index not in held.frames:
            continue
        state = close_frame(state, frame)
        held = state.owners[frame.owner]
        if held.next_frame == frame.index + 1:
            state = renewed(state, frame.owner, next_frame=frame.index)
    return state


def _without_captured(state: CompilerState, token: int) -> CompilerState:
    queue = state.inputs[token]
    kept = tuple(entry for entry in queue.entries if not entry.in_frame)
    return replace(state, inputs=state.inputs.set(token, replace(queue, entries=kept)))
