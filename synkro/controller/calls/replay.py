"""A way into a failure: what has failed on a worker runs once more in this process.

::

    a call, or a task, fails    Failed.began                how it began, from the worker
    RemoteTraceback.again       Failure                     the call, or the item, here
    error.replay(), debug()     Replay ─▶ Scene             copies of what the worker has
                                run_here                    the function, at its place among the ranks
"""

from __future__ import annotations

import contextlib
import functools
import pdb
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import (
    RemoteTraceback,
    SessionClosed,
    UsageError,
    WorkerError,
    cut,
    folded,
    shown,
    warn,
)
from ...messages import Replay
from ...packing import kinds
from ...packing.code import functions_of, uses
from ...packing.kinds import WHOLE
from ...packing.pickles import OUT_OF_BAND, Reader
from ...packing.scene import Began, Scene
from ...plan.call import CallPlan
from ...values.variable import Variable
from .check import preserved
from .distribution import SentFunction, Services
from .planner import Planned
from .serial import in_place_of


@dataclass(frozen=True, eq=False)
class Failure:
    """A run of a *function* that has failed on *rank*.

    *planned* plans the call once more, or what all items have in common.  *item* are the arguments of a
    task; None of a call.
    """

    services: Services
    function: SentFunction
    planned: Callable[[], Planned]
    rank: int
    item: tuple[Any, ...] | None = None

    def again(self, trace: RemoteTraceback) -> Any:
        """Run the function once more, here, or, on GPUs, on the rank; *trace* is that of the failure,
        which is not kept in here, as it keeps this."""
        engine, name = self.services.engine, self.function.name
        with engine.lock:
            try:
                engine.wait_until_ready()
                engine.settle()
            except SessionClosed:
                raise UsageError(
                    f"the session is closed, and what the function {name!r} had on the worker is gone: "
                    f"call error.replay(), or debug(), before close(), or inside of the with block; or "
                    f"run the function here, by as_serial()."
                ) from None
            planned = self.planned()  # which holds what it names
            command = self._command(planned.plan, trace.began)
            if not engine.on_gpus:
                found = engine.run(command)[self.rank].pickle
            else:
                with preserved(engine, self.function) as put_back:
                    found = engine.run(command)[self.rank].pickle
                    put_back()
                if not pickle.loads(found):
                    _say(f"the failure did not come again: {name!r} has raised nothing on the rank.")
                return None
        scene = Reader(found, (), self.services.objects.handover.by_number()).load()
        return run_here(scene, trace, name, self.rank)

    def _command(self, plan: CallPlan, began: bytes) -> Replay:
        item = None
        if self.item is not None:
            values = self.services.objects.values(OUT_OF_BAND)
            stream, buffers, _ = values.pickled(self.item)
            item = pickle.dumps((stream, [*map(bytes, buffers)]), 5)
        opens = self.services.engine.on_gpus
        return Replay(plan, self.rank, item, began, opens)


def remembered(
    error: WorkerError,
    services: Services,
    function: SentFunction,
    planned: Callable[[], Planned],
    item: tuple[Any, ...] | None = None,
) -> WorkerError:
    """Keep with an *error* how to run once more the function that has raised it; returns the error."""
    trace = error.__cause__
    if isinstance(trace, RemoteTraceback) and trace.began:
        keep(trace, Failure(services, function, planned, error.rank, item).again)
    return error


_kept: deque[weakref.ref[RemoteTraceback]] = deque()  # those that know how to run again
_MOST = 100


def keep(trace: RemoteTraceback, again: Callable[[RemoteTraceback], Any]) -> None:
    """Keep with a traceback how to run once more what has failed; the oldest of a hundred loses that."""
    trace.keep(again)
    _kept.append(weakref.ref(trace))
    while len(_kept) > _MOST:
        oldest = _kept.popleft()()
        if oldest is not None:
            oldest.keep(None)


def run_here(scene: Scene, trace: RemoteTraceback, name: str, rank: int) -> Any:
    """Run a scene in this process, as *rank*; says what the run that failed had changed.

    Returns what the function returns, with a warning.  Raises: what it raises.
    """
    began: Began = pickle.loads(trace.began)
    expected = trace.text.rstrip("\n").rpartition("\n")[2].partition(":")[0].rpartition(".")[2]
    held = dict(_held(scene.fn))
    before = {called: _digest(value) for called, value in held.items()}
    try:
        with in_place_of(scene, began, name):
            value = scene.fn(*scene.args, **scene.kwargs)
    except Exception as error:
        _be_known(error)
        _come_of(error, trace)
        changed = [called for called, value in held.items() if _digest(value) != before[called]]
        if changed:
            _say(
                f"before it failed on rank {rank}, {name!r} had changed {', '.join(changed)}: the "
                f"replay began with what that had left."
            )
        if type(error).__name__ != expected:
            _say(f"on rank {rank} it was {cut(trace.text.rstrip().rpartition(chr(10))[2])}")
        raise
    warn(
        f"the failure did not come again: {name!r} has returned {shown(value)} in this process. On rank "
        f"{rank} it raised {cut(trace.text.rstrip().rpartition(chr(10))[2])}"
    )
    return value


def _be_known(error: BaseException) -> None:
    """Let an exception be of the program's own class, of whose copy it is."""
    kind = type(error)
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and found is not kind:
        with contextlib.suppress(TypeError):
            error.__class__ = found


def _come_of(error: BaseException, trace: RemoteTraceback) -> None:
    """Note, where no traceback shows it, that an exception is the one of *trace*, for ``debug``."""
    seen, first = {id(error)}, error
    while (above := first.__cause__ or first.__context__) is not None and id(above) not in seen:
        seen.add(id(above))
        first = above
    first.__context__, first.__suppress_context__ = trace, True


def _held(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function uses that can change, and what that is called in a sentence."""
    for plain in functions_of(fn):
        names = plain.__globals__
        found = {
            f"the global {name!r}": names[name] for name in uses(plain.__code__).names if name in names
        }
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                found[f"the name {name!r}"] = cell.cell_contents
        for called, value in found.items():
            if isinstance(value, Variable):
                yield value.called(), value
            elif kinds.kind_of(value) not in (None, kinds.CLASS, kinds.FUNCTION, kinds.FIXED):
                yield called, value
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield f"its object, {shown(owner)},", owner


def _digest(value: Any) -> Any:
    """What is equal as long as *value* does not change; None where nobody can tell."""
    with contextlib.suppress(Exception):
        return kinds.OPAQUE.look(np.array(value.value) if isinstance(value, Variable) else value)[WHOLE]
    return None


def _say(text: str) -> None:
    print(f"Synkro: {text}", file=sys.stderr)


def debug(error: BaseException | None = None) -> None:
    """Run what has failed on a worker once more, and open pdb at the line that raises.

    The function runs in this process, as ``WorkerError.replay`` says, with copies of what the worker
    has.  On GPUs, which this process never touches, it runs on the worker, and so does the debugger.

    Args:
        error: a WorkerError, or another exception that came of one, such as that of an executor's
            future; by default the one that is being handled, or that nobody has handled last.

    Raises: UsageError if there is no such error; as ``WorkerError.replay``.
    """
    try:
        _latest(error)()
    except Exception as caught:
        outside = isinstance(caught, UsageError) and not _is_in_function(caught)
        trace = folded(caught).__traceback__
        if outside:
            raise
        sys.last_type, sys.last_value, sys.last_traceback = type(caught), caught, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = caught
        print(f"{type(caught).__name__}: {cut(str(caught))}")
        pdb.post_mortem(trace)


def _is_in_function(error: BaseException) -> bool:
    """Whether an error comes out of a function of the user's that was run here."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is run_here.__code__:
            return True
        trace = trace.tb_next
    return False


def _latest(error: BaseException | None) -> Callable[[], Any]:
    """How to run once more what *error*, or the last one, came of.  Raises: UsageError."""
    last = error or sys.exc_info()[1] or getattr(sys, "last_value", None)
    seen = set[int]()
    found: BaseException | None = last
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, RemoteTraceback) and found.again is not None:
            return functools.partial(found.again, found)
        if isinstance(found, WorkerError) and not isinstance(found.__cause__, RemoteTraceback):
            break
        found = found.__cause__ or found.__context__
    if isinstance(last, WorkerError):
        return last.replay  # which says why it cannot be
    raise UsageError(
        "debug() found no failure of a worker: call it after a WorkerError, at the prompt or in an "
        "except block, or give it one, as debug(error)."
    )
