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
import pickle
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ...messages import Replay
from ...packing.code import functions_of, uses
from ...packing.pickles import OUT_OF_BAND, Reader
from ...packing.scene import OF_WORKER, Began, Scene
from ...plan.call import CallPlan
from ...values.variable import Variable
from .check import preserved
from .distribution import SentFunction, Services
from .planner import Planned
from .serial import in_place_of

Enter = Callable[[BaseException], None] | None


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

    def again(self, trace: errors.RemoteTraceback, enter: Enter) -> Any:
        """Run the function once more, here, or, on GPUs, on the rank; *trace* is that of the failure,
        which is not kept in here, as it keeps this.  *enter* is as in ``run_here``.

        Raises: UsageError in a closed session, and for what cannot be copied; as ``run_here``.
        """
        engine, name = self.services.engine, self.function.name
        with engine.lock:
            try:
                engine.wait_until_ready()
                engine.settle()
            except errors.SessionClosed:
                how = "by as_serial()" if self.item is None else "itself, with the item"
                raise errors.UsageError(
                    f"the session is closed, and what the function {name!r} had on the worker is gone: "
                    f"call error.replay(), or debug(), before close(), or inside of the with block; or "
                    f"call the function here, {how}."
                ) from None
            planned = self.planned()  # which holds what it names
            command = self._command(planned.plan, trace.began)
            handover, changed = self.services.objects.handover, list[str]()
            if not engine.on_gpus:
                try:
                    found: bytes = engine.run(command)[self.rank].pickle
                except errors.WorkerError as error:
                    raise errors.UsageError(
                        f"what the function {name!r} has on rank {self.rank} cannot be copied: "
                        f"{errors.cut(str(error))} Write breakpoint() into the function instead: the "
                        f"debugger opens there."
                    ) from error
                # it may hold what cannot be compared
                with contextlib.suppress(errors.WorkerError, errors.UsageError):
                    changed = handover.changed_on(self.rank, self.function.roots)
            else:
                with preserved(engine, self.function) as put_back:
                    found = engine.run(command)[self.rank].pickle
                    put_back()
                if not pickle.loads(found):
                    _say(f"the failure did not come again: {name!r} has raised nothing on the rank.")
                return None
        return run_here(Reader(found, ()).load(), trace, name, self.rank, enter, changed)

    def _command(self, plan: CallPlan, began: bytes) -> Replay:
        item = None
        if self.item is not None:
            stream, buffers, _ = self.services.objects.values(OUT_OF_BAND).pickled(self.item)
            item = pickle.dumps((stream, [*map(bytes, buffers)]), 5)
        return Replay(plan, self.rank, item, began, self.services.engine.on_gpus)


def remembered(
    error: errors.WorkerError,
    services: Services,
    function: SentFunction,
    planned: Callable[[], Planned],
    item: tuple[Any, ...] | None = None,
) -> errors.WorkerError:
    """Keep with an *error* how to run once more the function that has raised it; returns the error."""
    trace = error.__cause__
    if isinstance(trace, errors.RemoteTraceback) and trace.began:
        keep(trace, Failure(services, function, planned, error.rank, item).again)
    return error


_kept: deque[weakref.ref[errors.RemoteTraceback]] = deque()  # those that know how to run again
_last: list[errors.RemoteTraceback] = []
_MOST = 100
_TOLD = 5  # objects that a sentence names
_COMPARED = 1000  # characters of an exception's class and text


def keep(trace: errors.RemoteTraceback, again: Callable[[errors.RemoteTraceback, Enter], Any]) -> None:
    """Keep with a traceback how to run once more what has failed; the oldest of a hundred loses that.

    At a prompt the last one is kept in any case: an error that nobody handles is forgotten there with
    the next one.
    """
    trace.keep(again)
    if hasattr(sys, "ps1"):
        _last[:] = [trace]
    _kept.append(weakref.ref(trace))
    while len(_kept) > _MOST:
        oldest = _kept.popleft()()
        if oldest is not None:
            oldest.keep(None)


def run_here(
    scene: Scene,
    trace: errors.RemoteTraceback,
    name: str,
    rank: int,
    enter: Enter,
    changed: Iterable[str] = (),
) -> Any:
    """Run a scene in this process, as *rank*, where functions have *changed* this of the program's.

    *enter* is called with what is raised, while this process stands where the rank stood.  Returns what
    the function returns, with a warning.  Raises: what it raises.
    """
    began: Began = pickle.loads(trace.began)
    variables = dict(_variables_of(scene.fn))
    before = {called: np.array(variable.value) for called, variable in variables.items()}
    others = list(map(repr, changed))
    failed: BaseException | None = None
    with in_place_of(scene, began, name):
        try:
            value = scene.fn(*scene.args, **scene.kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed = error
            _come_of(error, trace)
            others += [each for each in variables if _differ(before[each], variables[each].value)]
            _tell_changed(name, rank, others)
            if not trace.summary.startswith(f"{type(error).__name__}: {error}"[:_COMPARED]):
                _say(f"on rank {rank} it was {errors.cut(trace.summary)}")
            _complete(error)
            if enter is not None:
                enter(errors.folded(error))
    if failed is not None:
        _be_known(failed)
        raise failed
    _tell_changed(name, rank, others)
    errors.warn(
        f"the failure did not come again: {name!r} has returned {errors.shown(value)} in this process. "
        f"On rank {rank} it raised {errors.cut(trace.summary)}"
    )
    return value


def _tell_changed(name: str, rank: int, changed: Sequence[str]) -> None:
    if changed:
        more = f" and {len(changed) - _TOLD} more" if len(changed) > _TOLD else ""
        _say(
            f"{', '.join(changed[:_TOLD])}{more}: on rank {rank} this is what {name!r}, before it "
            f"failed, or earlier calls have made of it, and the replay begins with that."
        )


def _variables_of(fn: Any) -> Iterator[tuple[str, Variable[Any]]]:
    """The variables that a function uses, and what they are called in a sentence."""
    for plain in functions_of(fn):
        found = {name: plain.__globals__.get(name) for name in uses(plain.__code__).names}
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                found[name] = cell.cell_contents
        for name, value in found.items():
            if isinstance(value, Variable):
                yield f"the variable {name!r}", value


def _differ(one: Any, other: Any) -> bool:
    return bool(one.shape != other.shape or one.tobytes() != np.asarray(other).tobytes())


def _complete(error: BaseException) -> None:
    """Give the names of a worker that an exception came through the others that the program has: for a
    user who looks around."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_globals
        if OF_WORKER in names:
            there = vars(sys.modules.get(names["__name__"], sys))
            for name, value in list(there.items()) if names["__name__"] in sys.modules else ():
                names.setdefault(name, value)


def _be_known(error: BaseException) -> None:
    """Let an exception, and those that it came of, be of the program's own classes, of whose copies they
    are."""
    for each in _origins(error):
        kind = type(each)
        found: Any = sys.modules.get(kind.__module__)
        for part in kind.__qualname__.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and found is not kind:
            with contextlib.suppress(TypeError):
                each.__class__ = found


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it came of, or is a group of, each once, and the nearest first."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            left += [found.__cause__, found.__context__]
            if sys.version_info >= (3, 11) and isinstance(found, BaseExceptionGroup):  # noqa: F821
                left += found.exceptions
            yield found


def _come_of(error: BaseException, trace: errors.RemoteTraceback) -> None:
    """Note, where no traceback shows it, that an exception is the one of *trace*, for ``debug``."""
    seen, first = {id(error)}, error
    while (above := first.__cause__ or first.__context__) is not None and id(above) not in seen:
        seen.add(id(above))
        first = above
    first.__context__, first.__suppress_context__ = trace, True


def _say(text: str) -> None:
    print(f"Synkro: {text}", file=sys.stderr)


def debug(error: BaseException | None = None) -> None:
    """Run what has failed on a worker once more, and open pdb at the line that raises.

    The function runs in this process, as ``WorkerError.replay`` says, with copies of what the worker
    has.  On GPUs, which this process never touches, it runs on the worker, and so does the debugger.

    Args:
        error: a WorkerError, or another exception that came of one, such as that of an executor's
            future; by default the one that is being handled, or that nobody has handled last.

    Raises: InvalidType for what is no exception; UsageError if there is no such error; as
    ``WorkerError.replay``.
    """
    entered: list[BaseException] = []

    def enter(caught: BaseException) -> None:
        import pdb  # noqa: PLC0415  it takes a while

        entered.append(caught)
        sys.last_type, sys.last_value, sys.last_traceback = type(caught), caught, caught.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = caught
        print(f"{type(caught).__name__}: {errors.cut(str(caught))}")
        pdb.post_mortem(caught.__traceback__)

    try:
        _latest(error)(enter)
    except BaseException as caught:
        if not any(caught is each for each in entered):
            raise errors.folded(caught)  # noqa: B904  it is the same one


def _latest(error: BaseException | None) -> Callable[[Enter], Any]:
    """How to run once more what *error*, or the last one, came of.  Raises: UsageError."""
    if error is not None and not isinstance(error, BaseException):
        raise errors.InvalidType(
            f"debug() takes an exception, such as a WorkerError; got {errors.shortened(error)}."
        )
    last = sys.exc_info()[1] if error is None else error
    for found in _origins(getattr(sys, "last_value", None) if last is None else last):
        if isinstance(found, errors.RemoteTraceback) and found.again is not None:
            return functools.partial(found.again, found)
    if error is None:
        living = [trace for trace in (each() for each in _kept) if trace is not None and trace.again]
        if living:
            return functools.partial(living[-1].again, living[-1])
        raise errors.UsageError(
            "debug() found no failure of a worker: call it after a WorkerError, at the prompt or in an "
            "except block, or keep the error, and call debug(error)."
        )
    raise errors.UsageError(
        f"debug() got {errors.shortened(error)}, and knows of no run of a function of which it came: "
        f"give a WorkerError that a call or a map of this program has raised, or the exception of a "
        f"future of an Executor. Of several hundred failures only the last hundred are known."
    )
