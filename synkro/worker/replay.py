"""A run that has failed, once more: copied for the main program, or with a debugger in it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import InvalidValue, folded
from ..messages import Replay
from ..packing.scene import Began, Scene, singles_at
from ..values.random import with_states
from .call import PreparedCall
from .scene import SceneWriter, imported_by
from .workspace import Workspace


def replayed(rank: Workspace, command: Replay) -> bytes:
    """The ``Scene``, pickled; or, after a debugger was in it, whether the function has raised something.

    Raises: what pickling raises.
    """
    plan, began = command.plan, pickle.loads(command.began)
    spec = rank.functions[plan.function]
    call = PreparedCall(rank, plan)
    world = tuple(range(rank.size)) if began.task else plan.world if spec.finish else plan.participants
    if rank.number not in world:
        raise InvalidValue(
            f"rank {rank.number} has no rows any more: the arguments of the call have fewer now. Call "
            f"the function with those that it failed on, and replay that."
        )
    place = world.index(rank.number), len(world)
    owned = rank.objects.generators()
    states = [(owned[number], state) for number, state in began.owned.items() if number in owned]
    with _given(rank, call, command, began) as (args, kwargs), with_states(states):
        if command.opens:
            return pickle.dumps(_entered(rank, spec.fn, args, kwargs, began, place))
        rows = None if began.task else call.rows()
        writer = SceneWriter()
        parts = rows, place, rank.group.where, imported_by(spec.fn), dict(np.geterr())
        writer.dump(Scene(spec.fn, [*args], dict(kwargs), *parts))
        return writer.stream


@contextlib.contextmanager
def _given(
    rank: Workspace, call: PreparedCall, command: Replay, began: Began
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A block with the arguments of the run."""
    if command.item is None:
        with call.shown(began.piece) as found:
            yield found
        return
    stream, buffers = pickle.loads(command.item)
    args = rank.objects.unpickled("the item", stream, buffers)
    with contextlib.closing(call.common()) as common:
        yield args, next(common) if command.plan.inputs else {}


def _entered(
    rank: Workspace, fn: Any, args: Any, kwargs: Any, began: Began, place: tuple[int, int]
) -> bool:
    """Run the function, and open a debugger at the line that raises; returns whether one does."""
    rng = [] if began.rng is None else [(rank.group.generator.own(), began.rng)]
    with rank.group.replaying(began.results, place), with_states([*rng, *singles_at(began)]):
        try:
            rank.run(fn, args, kwargs)
        except Exception as error:
            import pdb  # noqa: PLC0415  it takes a while

            trace = folded(error).__traceback__
            print(f"{type(error).__name__}: {error}")
            pdb.post_mortem(trace)
            return True
        return False
