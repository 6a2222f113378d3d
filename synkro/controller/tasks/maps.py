"""``map`` and ``imap``: a function of one item at a time, on whichever worker is free."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from ...errors import (
    InvalidType,
    InvalidValue,
    NotAvailable,
    SessionError,
    SynkroError,
    UsageError,
    WorkerError,
    check_keywords,
    cut,
    folded,
    how_to_await,
    shortened,
    too_deep,
)
from ...ipc.queue import Dispatcher
from ...memory.interrupts import uninterrupted
from ...memory.segment import check_descriptors, undoing
from ...messages import FunctionSpec, Work
from ...packing import fingerprint
from ...packing.pickles import OUT_OF_BAND
from ...packing.refused import stays
from ...plan.binding import Bound
from ...plan.outputs import flatten, unflatten
from ...storage.checkpoint import Checkpoint
from ...values.arrays import checked_bool
from ..calls.arguments import Whole, holds_data
from ..calls.distribution import SentFunction, Services
from ..calls.function import Function, Options, check_returns, name_of
from ..calls.planner import Planned, Planner, Request
from ..calls.replay import remembered
from ..data.data import Data
from ..objects.values import SharedByTasks
from ..progress import Progress
from ..variables.shared import Shared, check_whole
from .deaths import Deaths
from .feed import Feed, Item, ItemSource
from .map import Map
from .outcomes import Collected, Outcomes, ResultOrder
from .wishes import Wishes

R = TypeVar("R")

_INSTANT = (list, tuple, range, str, dict, set, frozenset, np.ndarray)
"""Iterables whose items are there."""


class TaskFunction(SentFunction):
    """A function of one item.  Each map sends all that has changed of what it uses."""

    def __init__(self, services: Services, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.name: str = name_of(fn)
        self._services = services
        self._join(services, FunctionSpec(self.name, fn, None))

    def planned(self, common: dict[str, Any]) -> Planned:
        """The plan of a call with what all items have in *common*."""
        return Planner(self._services, self, _bind, ()).planned(Request((), common))

    def remember(self, common: dict[str, Any], error: BaseException, item: tuple[Any, ...]) -> None:
        """Keep with an *error* how to run once more the task on an *item* that it was of."""
        if isinstance(item[0], Item):
            item[0].remember(error)
        elif isinstance(error, WorkerError):
            remembered(error, self._services, self, functools.partial(self.planned, common), item)

    def command(
        self, common: dict[str, Any], descriptors: tuple[int, ...], shared: SharedByTasks, wished: Wishes
    ) -> tuple[Planned, Work]:
        """The command that runs the function on items, with *common* arguments; the function is brought
        first.  What its tasks share is said by *shared*, which learns what the function uses.  How it
        goes on after a task is *wished*."""
        services = self._services
        planned = self.planned(common)
        if not self._distribution.bring(self):
            services.objects.send_changes(self)
        seed, number = services.variables.next_map()
        shared.use(self.roots)
        held = [*common.values()]
        classes = {*_classes((held,)), *(value for value in held if isinstance(value, type))}
        shared.add({id(cls): cls for cls in classes})
        how = wished.goes_on, wished.max_tasks
        return planned, Work(planned.plan, descriptors, seed, number, *how, {})


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Bound]:
    """The arguments by keyword that all items have in common."""
    return [Bound(name, True, _as_given(name, value), None) for name, value in kwargs.items()]


def _as_given(name: str, value: Any) -> Any:
    """*value*, so that lists and tuples of numbers do not become arrays."""
    try:
        plain = isinstance(value, list | tuple | dict) and not holds_data(value)
    except RecursionError:
        raise too_deep(f"common={{{name!r}: …}}") from None
    return Whole(value) if plain else value


class Maps:
    """The maps of a session."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._queue: Dispatcher | None = None
        self._descriptors: tuple[int, ...] = ()
        self._last: TaskFunction | None = None  # so that the next map finds it, or its objects, there
        self._used: Callable[[], Map | None] = lambda: None  # the map that has it

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        common: Mapping[str, Any] | None = None,
        progress: bool = False,
        timeout: float | None = None,
        chunksize: int | None = None,
        retries: int = 0,
        errors: Literal["raise", "return"] = "raise",
        checkpoint: str | os.PathLike[str] | None = None,
        item_timeout: float | None = None,
        max_tasks: int | None = None,
    ) -> list[R]:
        """Call *fn* with each item, on whichever worker is free; returns the results, in order.

        The items are those of the iterable, or, with several, one of each at a time, until the shortest
        ends.  They, and what *fn* returns, may be anything that pickles.

        Args:
            fn: a function of one item, which does not depend on what others do: it uses no collectives,
                and changes no variables and no objects that it shares with other calls.  ``rng()`` in
                it is the item's own stream, the same for any number of workers.
            iterables: the items.  They are read as they are needed.
            common: arguments that all items have in common, by name.  Arrays and ``Data`` among them
                are read-only in *fn*; an array is copied into shared memory once, ``Data`` are not.
            progress: show a bar over the items, as in calls.
            timeout: seconds that all of it may take; None for what ``fn.options(timeout=)`` or the
                session says.
            chunksize: how many items go to a worker together at most; None for what their tasks take
                so long as allows.  A worker that has nothing to do takes over what another has not
                begun, so there is seldom a reason to say it.
            retries: how often a task that has failed is tried again, with a new copy of its item, and
                the same ``rng()``; what it has done outside of itself is then done twice.  It fails if
                it raises an exception, takes too long, or its worker dies: then another worker takes
                the place of that, with the same functions, objects and variables.  A ``UsageError`` is
                never tried again.
            errors: what becomes of a task that has failed, after all *retries*: with ``"raise"`` no
                other begins, and its exception is raised; with ``"return"`` all go on, and the
                exception, as it would be raised, is the result of its item.
            checkpoint: the path of a file to which each result is written as it comes.  When the file is
                there, the map goes on from it: items whose results it has do not run again, and
                ``rng()`` draws what it would have drawn.  It has to be of the same function, with the
                same code, common arguments and whatever it uses, and of the same items.  What has failed
                runs again.  To begin anew remove the file.
            item_timeout: seconds that a task may take.  One that takes longer has failed: it is ended
                with its worker, also where that is stuck in C, and another worker takes its place.
            max_tasks: after so many tasks a worker ends, and another one takes its place.

        Raises: InvalidType, InvalidValue for what cannot be called or pickled, and for a checkpoint of
        something else; NotAvailable for *item_timeout* and *max_tasks* where workers are not replaced,
        on GPUs and over several hosts; OSError if the checkpoint cannot be written; WorkerError for the
        first item on which *fn* failed, when the tasks that ran have ended; what the iterables raise;
        WorkerDied, CallTimeout, SessionError.  All of them, and KeyboardInterrupt, have the attributes
        ``results``, those that were there, ``finished``, the numbers of their items, and ``pending``,
        the numbers of all other items (of a generator's those that were read).
        """
        how = retries, errors, checkpoint, item_timeout, max_tasks
        wishes = Wishes(progress, timeout, chunksize, *how)
        with self._services.engine.lock:
            self._services.engine.turns.wait_for_all()
            run, bar = self._made(ResultOrder.AT_ONCE, fn, iterables, common, wishes)
            with bar or contextlib.nullcontext():
                return run.all()

    def imap(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        common: Mapping[str, Any] | None = None,
        progress: bool = False,
        timeout: float | None = None,
        chunksize: int | None = None,
        ordered: bool = True,
        retries: int = 0,
        errors: Literal["raise", "return"] = "raise",
        checkpoint: str | os.PathLike[str] | None = None,
        item_timeout: float | None = None,
        max_tasks: int | None = None,
    ) -> Results[R]:
        """An iterator over what ``map`` returns: each result as soon as it and those before it are
        there, or, if not *ordered*, as soon as it is there.

        *fn*, *iterables*, *common*, *progress*, *chunksize*, *retries*, *errors*, *checkpoint*,
        *item_timeout* and *max_tasks* are as in ``map``.  The workers go on while the program uses a
        result.  Only so many items are read ahead that the workers have enough to do, and as many
        results are kept.  Another call of the program meanwhile waits for the tasks that run.
        *timeout* is for each result.  What it raises has the ``results`` that the program did not get.
        """
        order = ResultOrder.KEPT if checked_bool(ordered, "ordered") else ResultOrder.ANY
        how = retries, errors, checkpoint, item_timeout, max_tasks
        wishes = Wishes(progress, timeout, chunksize, *how)
        return Results(*self._made(order, fn, iterables, common, wishes))

    def serve(self, fn: Callable[[Any], Any], source: ItemSource, wishes: Wishes) -> Map:
        """A map of *fn* over items that come while it goes on; their pickles are the source's."""
        return self._make(ResultOrder.ANY, fn, (source,), None, wishes, source)[0]

    def _made(
        self, order: ResultOrder, fn: Any, iterables: tuple[Any, ...], common: Any, wishes: Wishes
    ) -> tuple[Map, Progress | None]:
        """A map, after its arguments were checked, and its bar; what is raised tells what is pending."""
        try:
            return self._make(order, fn, iterables, common, wishes)
        except BaseException as error:
            if isinstance(error, SynkroError | KeyboardInterrupt) and not isinstance(error, UsageError):
                vars(error).update(results=[], finished=[], pending=[*range(_length(iterables) or 0)])
            raise

    def _make(
        self,
        order: ResultOrder,
        fn: Any,
        iterables: tuple[Any, ...],
        common: Any,
        wishes: Wishes,
        source: ItemSource | None = None,
    ) -> tuple[Map, Progress | None]:
        engine = self._services.engine
        wished = wishes.checked(fn, engine.turns.limit)
        refusal = self._services.replacement.refusal
        if wished.needs_new_workers and refusal is not None:
            raise NotAvailable(f"{refusal} Leave item_timeout= and max_tasks= out.")
        at_once = order is ResultOrder.AT_ONCE
        fn, name = _checked_function(fn, "map" if at_once else "imap")
        iterators = [_iterator(each, n) for n, each in enumerate(iterables)]
        if not iterators:
            raise InvalidType(f"map() of the function {name!r} got no items: give an iterable.")
        given = _checked_common(fn, name, len(iterators), common)
        if not at_once:
            given = _detached(given)
        instant, length = all(type(i) in _INSTANT for i in iterables), _length(iterables)
        bar = Progress(name, length, "item") if wished.progress else None
        with engine.lock:
            engine.wait_until_ready()
            insist = self._services.replacement.insist if wished.outlives else _once
            insist(functools.partial(engine.settle, wished.limit))
            queue = self._opened()
            function, last = self._function_of(fn), self._last
            objects = self._services.objects
            shared = SharedByTasks(engine.settle, objects.rely)
            values = source.pickler if source else functools.partial(objects.values, shared=shared)
            with engine.turns.limited(wished.limit):
                bring = functools.partial(function.command, given, self._descriptors, shared, wished)
                introduce = functools.partial(values(OUT_OF_BAND).introduce, _classes(iterables))
                planned, work = insist(bring)
                try:
                    insist(introduce)
                except BaseException:
                    self._services.variables.forget_map(work.number)
                    raise
            checkpoint, work = _begun(wished.checkpoint, name, fn, given, work)
            self._last = function
        reading = iterators, length, instant or source is not None, at_once, wished.together
        feed = Feed(name, *reading, queue, values, engine, checkpoint, source)
        collected = Collected(order, checkpoint)
        read_block, host_of = engine.channel.read_block, engine.workers.pool.host_of
        parts = objects.load, read_block, host_of, functools.partial(function.remember, given)
        outcomes = Outcomes(queue, feed, collected, wished, *parts)
        replacement = self._services.replacement
        forget = functools.partial(self._services.variables.forget_map, work.number)
        called = "an Executor" if source else f"a map of the function {name!r}"
        deaths = Deaths(engine, replacement, queue, feed, shared, wished, called, forget)
        sent = planned, work, shared
        # of the last function the arguments in common may have been a part
        made = engine, function, last, queue, *sent, feed, collected, outcomes, wished, deaths, bar
        run = Map(*made)
        self._used = weakref.ref(run)
        return run, bar

    def _function_of(self, fn: Callable[..., Any]) -> TaskFunction:
        """*fn* for the workers; the last one, if it is that, and what it uses may change."""
        last, used = self._last, self._used()
        if last is not None and last.spec.fn is fn and (used is None or used.is_over):
            return last
        return TaskFunction(self._services, fn)

    def _opened(self) -> Dispatcher:
        """The queue, which is made for the first map."""
        if self._queue is not None:
            return self._queue
        engine = self._services.engine
        with uninterrupted():  # so that the workers have the descriptors, or there is no queue
            try:
                queue = Dispatcher(engine.size)
            except OSError as error:
                what = "the queue of tasks could not be made"
                check_descriptors(error, what)
                raise SessionError(f"{what} ({error}).") from error
            with undoing(queue.close):
                numbered = [(engine.directory.number(), fd) for fd in queue.descriptors]
                engine.workers.pass_descriptors(numbered)
            self._descriptors = tuple(number for number, _ in numbered)
            self._queue = queue
        return queue

    def close(self) -> None:
        """Give the descriptors back."""
        self._last = None
        if self._queue is not None:
            self._queue.close()


class Results(Iterator[R]):
    """The results of ``imap``, an iterator.

    When it is closed, or nobody refers to it any more, no other task begins.
    """

    def __init__(self, run: Map, bar: Progress | None) -> None:
        self._map = run
        self._reading = threading.RLock()
        self._closed = False
        self._open = contextlib.ExitStack()
        self._open.enter_context(bar or contextlib.nullcontext())
        run.read_by(self)

    def __next__(self) -> R:
        try:
            with self._reading:  # by one thread after the other
                if self._closed:
                    raise StopIteration
                value: R = self._map.next()
                return value
        except StopIteration:
            self._open.close()
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # it may have come where a result was taken
                self._map.interrupt()
            self._open.__exit__(type(error), error, error.__traceback__)
            raise folded(error)  # noqa: B904  it is the same one

    def close(self) -> None:
        """Let the tasks that run end, and no other begin; no more results come."""
        self._closed = True
        self._map.leave()
        self._open.close()


def _checked_function(fn: Any, verb: str) -> tuple[Callable[..., Any], str]:
    if isinstance(fn, Options):
        if fn.out is not None:
            raise InvalidValue(
                f"{verb}() returns a list of what its function returned, and takes no out=: write the "
                f"results to an array as they come."
            )
        fn = fn.function
    if isinstance(fn, Function):
        if fn.lane is not None:
            raise InvalidValue(
                f"{verb}() runs its function on whichever worker is free, and {fn.name!r} has a "
                f"target=: pass the plain function, {fn.name}.fn."
            )
        fn = fn.fn
    if not callable(fn):
        raise InvalidType(f"{verb}() takes a function, and then its items; got {shortened(fn)}.")
    if what := stays(getattr(fn, "__func__", fn)):
        raise InvalidType(f"{verb}() runs its function on the workers, and {what}")
    check_returns(fn, verb)
    return fn, name_of(fn)


def _begun(
    path: str | None, name: str, fn: Any, common: dict[str, Any], work: Work
) -> tuple[Checkpoint | None, Work]:
    """The checkpoint at *path* of a map of *fn*, and the *work* with its random numbers.

    Raises: InvalidValue if it is not of this map; OSError.
    """
    if path is None:
        return None, work
    checkpoint = Checkpoint(path)
    with undoing(checkpoint.close):
        parts = fingerprint.of_function(fn, common)
        seed, number = checkpoint.begin(name, parts, work.seed, work.number)
        return checkpoint, replace(work, seed=seed, number=number)


def _once(action: Callable[[], R]) -> R:
    return action()


def _iterator(iterable: Any, number: int) -> Iterator[Any]:
    try:
        return iter(iterable)
    except TypeError:
        advice = how_to_await(iterable) or (
            "Put it into a list, or, if all items have it in common, pass it as common={'name': …}."
        )
        raise InvalidType(
            f"map() takes iterables of items; number {number} is {shortened(iterable)}. {advice}"
        ) from None


def _checked_common(fn: Any, name: str, count: int, common: Any) -> dict[str, Any]:
    """What all items have in common, after a look whether *fn* takes that and *count* arguments."""
    if common is not None and not isinstance(common, Mapping):
        raise InvalidType(
            f"common= takes a dict: the names of parameters of {name!r}, and their values; got "
            f"{shortened(common)}."
        )
    shared = dict(common or {})
    for key, value in shared.items():
        if isinstance(value, Shared):  # a worker that takes an item would have its own rows
            check_whole(value, f"common={{{key!r}: …}}", value.ranks[:1])
    if not all(isinstance(key, str) for key in shared):
        raise InvalidType(f"the keys of common= are names of parameters of {name!r}: strings.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of builtins
        return shared
    called, parameters = cut(f"{name}{signature}"), signature.parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_keywords(f"{called}, by common=,", shared, parameters)
    try:
        signature.bind(*[None] * count, **shared)
    except TypeError as error:
        hint = ""
        if count == 1 and "missing" in str(error):
            hint = (
                " An item that is a tuple, as of enumerate() and zip(), is one argument: take one "
                "parameter and unpack it, or give an iterable for each, as in map(f, xs, ys)."
            )
        raise InvalidType(
            f"{called} cannot be called with {count} argument{'s' * (count > 1)} of each item"
            f"{' and common=' if shared else ''}: {cut(str(error))}.{hint}"
        ) from None
    return shared


def _detached(common: dict[str, Any]) -> dict[str, Any]:
    """What items have in common for as long as the program takes results: of frames of rings copies."""
    leaves, tree = flatten(common, holds_data, "common=")
    kept = (leaf.detached() if isinstance(leaf, Data) else leaf for leaf in leaves)
    found: dict[str, Any] = unflatten(tree, kept) if tree is not None else common
    return found


def _classes(iterables: tuple[Any, ...]) -> set[type]:
    """The classes of items that are there, but for those of Python and NumPy."""
    found = set[type]().union(*(map(type, each) for each in iterables if type(each) in (list, tuple)))
    return {cls for cls in found if cls.__module__ not in ("builtins", "numpy")}


def _length(iterables: tuple[Any, ...]) -> int | None:
    """How many items there are, if that is known."""
    lengths = [operator.length_hint(each, -1) for each in iterables]
    return min((n for n in lengths if n >= 0), default=None)
