"""The ranks of a running call, as the function that runs on them sees them.

``synkro.all_reduce(x)`` and the other collectives end here if they are called inside a function.  They
take arrays of any library, and return arrays of the same one; what becomes of the history of PyTorch's
tensors is in ``autograd``.  In ``as_serial`` the group is the main process alone.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .. import here
from ..comms.base import Communicator
from ..comms.members import Members
from ..comms.ops import FOR_ANY_INT, Operation, operation_named
from ..comms.records import Entry
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..errors import CollectiveError, InvalidType, InvalidValue, UsageError, counted, shortened, shown
from ..memory.interrupts import atomic
from ..messages import Phase
from ..packing.scene import Result
from ..packing.settings import is_initializing
from ..plan.outputs import by_name, flatten, unflatten
from ..values.arrays import Array, is_fixed, is_numeric, plain
from ..values.foreign import handed, has_history, host_array, library_of
from ..values.random import generator_of_item
from ..values.variable import Variable
from .recorded import Recorded
from .replica import Replica

Method = TypeVar("Method", bound=Callable[..., Any])


class Running(Protocol):
    """The call whose function runs.

    Attributes:
        name: that of the function.
        in_parts: whether it is cut into pieces of which the user has said nothing.
        piece: the number of that which runs.
    """

    name: str
    in_parts: bool
    piece: int

    def rows(self) -> NDArray[np.int64] | None:
        """The indices of the call's rows among all rows of the scattered inputs; None if there are
        none."""


class Task:
    """The task that runs, or ran last.

    Attributes:
        seed: of its map.
        map: the number of that.
        number: that of its item.
    """

    seed: int = 0
    map: int = 0
    number: int = 0


class RankGenerator:
    """The random generators of a rank: its own, made when it is first asked for, and that of a task.

    Attributes:
        own: returns the generator of the rank.
    """

    def __init__(self, make: Callable[[], np.random.Generator]) -> None:
        self.own: Final = functools.cache(make)  # when it is first used: numpy.random takes 2 MB
        self._of_task: tuple[Any, np.random.Generator] | None = None

    def begin(self) -> None:
        """Tasks begin: one that is tried again draws the same."""
        self._of_task = None

    def of(self, task: Task | None) -> np.random.Generator:
        """The generator of a *task*, or, if there is none, of the rank."""
        if task is None:
            return self.own()
        item = task.seed, task.map, task.number
        if self._of_task is None or self._of_task[0] != item:
            self._of_task = item, generator_of_item(*item)
        return self._of_task[1]

    @property
    def state(self) -> Any:
        """The state of the rank's own; None until it is asked for."""
        return self.own().bit_generator.state if self.own.cache_info().currsize else None

    def restore(self, state: Any) -> None:
        """Have the rank's own be in a *state*, or not be made yet, if that is None."""
        if state is None:
            self.own.cache_clear()
        else:
            self.own().bit_generator.state = state


def _collective(method: Method) -> Method:
    """While *method* runs, this rank is communicating."""

    @functools.wraps(method)
    def marked(self: Group, *args: Any, **kwargs: Any) -> Any:
        if self.checking:
            raise _no_plain_run("uses collectives")
        if self._task is not None:
            raise UsageError(
                "a task used a collective: tasks of map() run one by one, each on the worker that is "
                "free. Use a function() for what all ranks do together."
            )
        if self._running is None:
            if is_initializing():
                raise UsageError(
                    "an initializer used a collective: it runs on each worker by itself, also on one "
                    "that takes the place of another. Do it in a function(), after fork()."
                )
        elif self._running.in_parts:
            raise InvalidValue(
                f'{method.__name__}() was called in a call with num_slices="auto": it would see the '
                f"rows of one piece of each rank, and not all of them. Leave num_slices= out, or give "
                f"a number that suits the function."
            )
        if self.recorded.gives:
            return self.recorded.next(method.__name__, args)
        with self.turn:
            self.mark(Phase.COMMUNICATING)
            self.device.resume()
            try:
                result = method(self, *args, **kwargs)
                self.recorded.note(method.__name__, result)
                return result
            finally:
                self.comm.agreement.note(0, self.within)
                self.mark(Phase.RUNNING)

    return cast("Method", marked)


class Group:
    """One rank's view of the ranks that take part in a call.

    Attributes:
        comm: this rank's end of the collectives.
        device: what this rank computes on.
        generator: this rank's random generators.
        in_call: this rank's place among those of the call, and their number: also while another thread
            is in a collective of a world.
        checking: whether the call is one of ``Function.check``.
        turn: held in a collective: PyTorch's backward may enter some from threads of its own.
        within: the collective whose gradient is computed, if one is.
        stand_ins: in ``as_serial``, by the id of a variable: the variable, its value when it was first
            used, and the replica in its place.
        where: the number of this rank's host, its number there, and how many are there.
        recorded: the results of the collectives of the call.
    """

    def __init__(
        self,
        comm: Communicator,
        rng: Callable[[], np.random.Generator],
        device: Device | None = None,
        mark: Callable[[int], None] = lambda phase: None,
        master_rank: int = 0,
        where: tuple[int, int, int] = (0, 0, 1),
    ) -> None:
        """*rng* makes the generator; *mark* records for a trace what this rank does."""
        self.comm = comm
        self.mark = mark
        self.device: Final = device or CpuDevice()
        self._meeting = comm.agreement.meeting
        self.in_call: tuple[int, int] = comm.place, comm.count
        self.checking: bool = False
        self.turn: Final = threading.RLock()
        self.within: Entry | None = None
        self._exchanged: Counter[tuple[int, ...]] = Counter()  # by two ranks: how often in this call
        self.generator: Final = RankGenerator(rng)
        self._master_rank = master_rank
        self._task: Task | None = None
        self._running: Running | None = None
        self.stand_ins: dict[int, tuple[Variable, Array, Replica]] = {}
        self.where: Final = where
        self.recorded: Final = Recorded()

    def begin(self, epoch: int, ranks: tuple[int, ...], running: Running | None = None) -> None:
        """A call begins, in which *ranks* take part; *running*, if a function runs in it."""
        self.comm.begin(epoch, ranks)
        members = self._meeting.members
        self.in_call = members.place, len(members.ranks)
        self._running = running
        self._exchanged.clear()
        self.recorded.clear()

    @contextmanager
    def replaying(self, results: Iterable[Result], place: tuple[int, int]) -> Iterator[None]:
        """A block that is a call at this *place* among its ranks, whose collectives have these
        *results*."""
        before, checking = self.in_call, self.checking
        self.in_call, self.checking = place, False
        try:
            with self.recorded.giving(results):
                yield
        finally:
            self.in_call, self.checking = before, checking

    @contextmanager
    def among(self, members: Members) -> Iterator[None]:
        """Until the end of the block, *members* are the ranks, who have come out of ``split``.

        Raises: UsageError if that was in another call.
        """
        with self.turn, self.comm.among(members):
            yield

    @_collective
    def split(self, color: Any) -> Members | None:
        """The ranks with the same *color*, an int; None where it is None."""
        try:
            number = None if color is None else operator.index(color)
        except TypeError:
            raise InvalidType(
                f"split takes a color, an int that the ranks of one world share, or None for a rank of "
                f"no world; got {shown(color)}."
            ) from None
        return self.comm.split(number)

    def take(self, task: Task | None) -> None:
        """From now on *task* runs, on one item after the other, or none."""
        self._task = task
        self.generator.begin()

    @property
    def in_task(self) -> bool:
        """Whether a task runs."""
        return self._task is not None

    def forget(self) -> None:
        """The function of the call has returned: let go of its inputs."""
        self._running = None

    def rows(self) -> NDArray[np.int64]:
        """The indices of the rows that the function sees, among all rows of the scattered inputs.

        Raises: UsageError if the call has no scattered inputs.
        """
        rows = None if self._running is None else self._running.rows()
        if rows is None:
            raise UsageError(
                "rows() are the indices of rows of scattered inputs, and this call has none: scatter "
                "something with a row for each, such as np.arange(n). (Of what an earlier call left on "
                'the workers: let that call return rows(), too, as another output with "keep".)'
            )
        return rows

    def check(self, checking: bool) -> None:
        """From now on the calls are those of ``Function.check``, or not."""
        self.checking = checking

    @property
    def piece(self) -> int:
        """The number of the piece of the call that runs."""
        return 0 if self._running is None else self._running.piece

    @property
    def rng(self) -> np.random.Generator:
        if self.checking:
            raise _no_plain_run("draws from rng()")
        return self.generator.of(self._task)

    def stand_in(self, variable: Variable) -> Replica:
        """The replica that stands for a worker variable in ``as_serial``."""
        if id(variable) not in self.stand_ins:
            token = here.group.set(None)
            try:
                before = variable.value
            finally:
                here.group.reset(token)
            copy = self.comm.empty(before.shape, variable.dtype)
            copy[...] = before
            replica = Replica(variable.name, copy, self.device, self.comm)
            self.stand_ins[id(variable)] = variable, before, replica
        return self.stand_ins[id(variable)][-1]

    @property
    def master(self) -> int:
        """The place of the default root."""
        ranks = self._meeting.members.ranks
        return ranks.index(self._master_rank) if self._master_rank in ranks else 0

    @property
    def rank(self) -> int:
        return self.comm.place

    @property
    def size(self) -> int:
        return self.comm.count

    @_collective
    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.comm.barrier()

    @_collective
    def all_reduce(self, value: Any, op: Any = "mean", *, weight: Any = None) -> Any:
        """The values of all ranks as one, on every rank; floats always in the order of the ranks.

        *value* is an array, a number, or tuples, lists and dicts of them, in one go; a worker variable
        is reduced in place.  *op* is "mean", "sum", "prod", "max" or "min".  In a mean, a rank's value
        counts *weight* times: with ``weight=len(rows)`` the mean is exact for ranks with different
        numbers of rows.  The mean of integers is float64; sums of float16 accumulate in float32.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        operation = operation_named(op)
        leaves, tree = flatten(value, called="the value of all_reduce()")
        named = [id(leaf) for leaf in leaves if isinstance(leaf, Variable)]
        if len(set(named)) < len(named):
            raise InvalidValue("all_reduce got a variable twice: name each once.")
        order, names = by_name(tree)
        if len(named) == len(leaves) and leaves and weight is None:
            self.reduce_in_place([leaves[index] for index in order], operation, self.comm)
            return value
        factor = _weight(weight, operation)
        given = [leaves[index] for index in order]
        arrays = self._given(given, operation)
        beside = _rounded(arrays, operation)
        found = self.comm.all_reduce([*arrays, *beside.values()], operation, factor, names)
        _check_whole(given, found, beside, operation)
        pairs = list(zip(given, found[: len(given)], strict=True))
        fit = [fitted(r, g, operation) if isinstance(g, Variable) else r for g, r in pairs]
        results: list[Any] = [None] * len(leaves)
        for index, result in zip(order, self._results(given, fit, operation.name), strict=True):
            results[index] = result
        return unflatten(tree, iter(results))

    @_collective
    def reduce(
        self, value: Any, op: Any = "mean", *, root: int | None = None, weight: Any = None
    ) -> Any:
        """The values of all ranks as one, on the *root*; None on the others.

        The root is the master rank by default; *op* and *weight* are as in ``all_reduce``.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        _check_plain(value, "reduce", "all_reduce")
        operation = operation_named(op)
        factor = _weight(weight, operation)
        arrays = [self._array(value, operation)]
        beside = _rounded(arrays, operation)
        results = self.comm.reduce(
            [*arrays, *beside.values()], operation, factor, self._place(root, "root")
        )
        if results is None:
            return None
        _check_whole([value], results, beside, operation)
        return _like(value, results[0])

    @_collective
    def reduce_scatter(self, value: Any, op: str = "mean", *, weight: Any = None) -> Any:
        """This rank's rows of what ``all_reduce`` would return: those that ``scatter`` would give it."""
        operation = operation_named(op)
        factor = _weight(weight, operation)
        results = self.comm.reduce_scatter(self._given([value], operation), operation, factor)
        return self._results([value], results, operation.name)[0]

    @_collective
    def broadcast(self, value: Any, *, root: int | None = None) -> Any:
        """The *root*'s array, on every rank; what the others give does not matter.

        The root is the master rank by default.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        place = self._place(root, "root")
        given = self._given([value]) if place == self.rank else None
        return self._results([value], self.comm.broadcast(given, place))[0]

    @_collective
    def scatter(self, value: Any, *, root: int | None = None) -> Any:
        """This rank's rows of the *root*'s array, split as evenly as can be, the first having one more.

        The root is the master rank by default; what the others give does not matter.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        place = self._place(root, "root")
        given = self._given([value]) if place == self.rank else None
        return self._results([value], self.comm.scatter(given, place))[0]

    @_collective
    def all_gather(self, value: Any, nd_up: int = 0) -> Any:
        """The arrays of all ranks, on every rank, in the order of the ranks.

        They are concatenated along axis 0 (``nd_up=0``; numbers become rows) or stacked along a new one.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        results = self.comm.all_gather([_raised(self._given([value])[0], nd_up)])
        return self._results([value], results)[0]

    @_collective
    def gather(self, value: Any, nd_up: int = 0, *, root: int | None = None) -> Any:
        """The arrays of all ranks, as in ``all_gather``, on the *root*; None on the others.

        The root is the master rank by default.

        Raises: InvalidType, InvalidValue; CollectiveError.
        """
        _check_plain(value, "gather", "all_gather")
        place = self._place(root, "root")
        results = self.comm.gather([_raised(self._array(value), nd_up)], place)
        return None if results is None else _like(value, results[0])

    @_collective
    def all_to_all(self, value: Any) -> Any:
        """The rows that all ranks have for this one, in the order of the ranks.

        Each rank's rows are split over the ranks as ``scatter`` splits them.
        """
        return self._results([value], self.comm.all_to_all(self._given([value])))[0]

    @_collective
    def exchange(self, value: Any, with_rank: int) -> Any:
        """Give an array to another rank, and get the one that it gives; both call it.

        There is no deadlock.  Their shapes and dtypes may differ.  A rank that exchanges with itself
        gets a copy of its own.
        """
        place = self._place(with_rank, "with_rank")
        result = self.comm.exchange(self._given([value])[0], place)
        ranks = self._meeting.members.ranks
        first, second = pair = tuple(sorted((ranks[place], ranks[self.rank])))
        self._exchanged[pair] += 1
        name = f"exchange {self._exchanged[pair]} of ranks {first} and {second}"
        entry = self._meeting.entry()[0], name
        return self._results([value], [result], entry=entry, other=place)[0]

    @_collective
    def send(self, value: Any, to: int) -> None:
        """Send an array to another rank, which receives it with ``recv``; in order.

        It does not wait for that: only after 8 arrays that were not yet received does it wait.
        """
        _check_plain(value, "send", "exchange")
        self.comm.send(self._array(value), self._other(to, "to"))

    @_collective
    def recv(self, source: int) -> Any:
        """Wait for the next array that the rank *source* sends to this one."""
        return _like(None, self.comm.recv(self._other(source, "source")))

    def reduce_in_place(
        self, variables: Sequence[Variable], operation: Operation, comm: Communicator
    ) -> None:
        """All-reduce the replicas of *variables* in place, by *comm*.

        Raises: InvalidValue for a result that the variable's dtype does not have.
        """
        for variable in variables:
            operation.check(variable.dtype, f"all_reduce of {variable.called()}")
        places = [
            variable.in_place() if operation.result_dtype(variable.dtype) == variable.dtype else None
            for variable in variables
        ]
        others = [v for v, place in zip(variables, places, strict=True) if place is None]
        values: list[Array] = []
        if others:  # first: they may raise an error, and then nothing has changed
            results = comm.all_reduce([self._array(v) for v in others], operation, 1)
            values = [fitted(r, v, operation) for v, r in zip(others, results, strict=True)]
        if direct := [place for place in places if place is not None]:
            comm.all_reduce_in_place(direct, operation)
        for variable, value in zip(others, values, strict=True):
            variable.value = value

    def assign(self, pairs: Iterable[tuple[Variable, Any]]) -> None:
        """Put new values into variables: on all ranks, or on none."""
        replicas = [(v if isinstance(v, Replica) else self.stand_in(v), value) for v, value in pairs]
        checked = [(replica, replica.checked(value)) for replica, value in replicas]
        with atomic:
            if self.size > 1:
                self.comm.barrier()  # raises CollectiveError if another rank has failed
            for replica, value in checked:
                replica.value = value

    @_collective
    def backward(self, entry: Entry, members: Members, work: Callable[[], Any]) -> Any:
        """Do *work*, whose collectives compute the gradient of the collective *entry* of *members*."""
        ranks = self._meeting.members.ranks
        if not members.at and members.ranks != ranks:
            raise UsageError(
                f"backward() came to a collective of the ranks {members.ranks} in a call of the ranks "
                f"{ranks}: call it in a call of the same ranks."
            )
        before, self.within = self.within, entry
        try:
            with self.among(members):
                self.comm.agreement.note(0, entry)
                return work()
        except CollectiveError as error:
            raise CollectiveError(
                f"{error} This was in the backward of {entry[1]}: all ranks have to call backward(), on "
                f"losses that depend on the same collectives. Where one has no use for the result of a "
                f"collective, let it add 0 * result.sum() to its loss.",
                error.strays,
            ) from error
        finally:
            self.within = before

    def _given(self, values: Sequence[Any], operation: Operation | None = None) -> list[Array]:
        """*values* as arrays, for a collective in which this rank tells which of them have a history."""
        tracked = sum(1 << index for index, value in enumerate(values) if has_history(value))
        self.comm.agreement.note(tracked, self.within)
        return [self._array(value, operation) for value in values]

    def _results(
        self,
        values: Sequence[Any],
        arrays: Sequence[Array],
        op: str = "",
        entry: Entry | None = None,
        other: int = -1,
    ) -> list[Any]:
        """*arrays*, the results for *values*, each as an array of its library, or in its variable.

        Where a tensor has a history on any rank, the result has one on every rank: *op* is the name of
        the operation, *entry* and *other* are those of an exchange.
        """
        agreement = self.comm.agreement
        results = list(map(_put, values, arrays))
        if agreement.tracked():
            from .autograd import with_history  # noqa: PLC0415  whoever has tensors has imported PyTorch

            return with_history(self, values, results, op, entry or self._meeting.entry(), other)
        return results

    def _array(self, value: Any, operation: Operation | None = None) -> Array:
        """*value* as a contiguous array where it lies, on the device or in host memory.

        Raises: InvalidType for what is no array, or nothing for the *operation*.
        """
        if isinstance(value, Variable):
            value = value.value
        array = self.device.adopt(value)
        here = self.device.xp
        if array is None:
            array, here = _in_host_memory(value), np
        if not (is_fixed if hasattr(value, "dtype") else is_numeric)(array.dtype):
            raise _refused(value)
        if operation is not None:
            operation.check(array.dtype, "a collective")
        native = array.dtype.newbyteorder("=")
        contiguous: Array = here.ascontiguousarray(array, native).reshape(array.shape)
        return contiguous

    def _place(self, rank: Any, name: str) -> int:
        if rank is None:
            return self.master
        try:
            place = operator.index(rank)
        except TypeError:
            raise InvalidType(f"{name} must be a rank, an int; got {shown(rank)}.") from None
        if not 0 <= place < self.size:
            take = f"{counted(self.size, 'rank')} {'takes' if self.size == 1 else 'take'} part"
            raise InvalidValue(
                f"{name}={place}, but {take} in {self._meeting.members.called()}: give one from 0 to "
                f"{self.size - 1}."
            )
        return place

    def _other(self, rank: Any, name: str) -> int:
        place = self._place(rank, name)
        if place == self.rank:
            raise InvalidValue(f"{name}={place} is this rank itself: send to, and receive from, others.")
        return place


def _no_plain_run(what: str) -> UsageError:
    return UsageError(
        f"check() compares a call with the function run once, on all rows; this function {what}, and "
        f"means nothing without the other ranks: compare its result with what you expect instead."
    )


def _check_plain(value: Any, name: str, instead: str) -> None:
    """Raises: InvalidValue for a tensor whose gradient some ranks would never compute."""
    if has_history(value):
        raise InvalidValue(
            f"{name}() got a tensor that requires grad, but not all ranks get a result of it, so "
            f"backward() would never run on some: use {instead}() where you want the gradient, and "
            f"{name}(x.detach(), …) where you do not."
        )


def fitted(result: Array, variable: Variable, operation: Operation) -> Array:
    """*result*, if it can be assigned to the variable: floats are rounded, no other element changes.

    Raises: InvalidValue.
    """
    if np.can_cast(result.dtype, variable.dtype, "same_kind"):
        return result
    with np.errstate(all="ignore"):
        converted = result.astype(variable.dtype)
    if not np.array_equal(converted, result):
        raise InvalidValue(
            f'the "{operation.name}" of {variable.called()} is not of its dtype {variable.dtype}: take '
            f"it with reduce(…, in_place=False), or make the variable a float."
        )
    return converted


def _refused(value: Any) -> InvalidType:
    """What to raise for what no collective takes."""
    instead = f" An int of more than 64 bits is none: {FOR_ANY_INT}." if type(value) is int else ""
    return InvalidType(
        f"a collective takes numbers, and arrays of numbers, dates, strings or records of a fixed size; "
        f"got {shortened(value)}.{instead}"
    )


def _in_host_memory(value: Any) -> Array:
    """Raises: InvalidType for what would lose something as an array."""
    array, lost = plain(host_array(value))
    if lost:
        raise InvalidType(f"a collective got {shortened(value)}, which would lose {lost}")
    return array


def _raised(array: Array, nd_up: int) -> Array:
    if nd_up not in (0, 1):
        raise InvalidValue(f"nd_up must be 0 (concatenate) or 1 (stack); got {shown(nd_up)}.")
    return array[None] if nd_up or not array.ndim else array


def _rounded(arrays: Sequence[Array], operation: Operation) -> dict[int, Array]:
    """The integers among *arrays*, by their places, as floats: merged, these show what does not fit 64
    bits.  Of NumPy's integers, too, though nobody looks at these, so that every rank gives as many."""
    if operation.name not in ("sum", "prod"):
        return {}
    return {
        number: np.asarray(array, np.float64)
        for number, array in enumerate(arrays)
        if isinstance(array, np.ndarray) and not array.ndim and array.dtype.kind in "iu"
    }


def _check_whole(
    values: Sequence[Any], results: Sequence[Array], beside: Mapping[int, Array], operation: Operation
) -> None:
    """Raises: InvalidValue where Python's integers, among *values*, have made one of more than 64 bits.

    Of the true result, the integer in *results* is the rest modulo 2**64.  The float behind them, which
    is off by far less than that, tells whether it is all of it.
    """
    for place, rounded in zip(beside, results[len(values) :], strict=True):
        off = abs(float(rounded) - int(results[place]))
        if type(values[place]) is int and off > 1 << 63:
            raise InvalidValue(
                f"the \"{operation.name}\" of the ranks' integers does not fit the 64 bits of NumPy's: "
                f"{FOR_ANY_INT}."
            )


def _weight(weight: Any, operation: Operation) -> float:
    if weight is None:
        return 1
    if not operation.weighted:
        raise InvalidValue(f'weight= is for op="mean"; got op="{operation.name}".')
    number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
    if not number or not 0 <= weight < math.inf:
        raise InvalidValue(
            f"weight must be a number of 0 or more, such as a count of rows; got {shown(weight)}."
        )
    return float(weight) if isinstance(weight, float | np.floating) else int(weight)


def _put(leaf: Any, result: Array) -> Any:
    """Put a result into the variable that *leaf* is, or return it as an array like *leaf*."""
    if isinstance(leaf, Variable):
        leaf.value = result
        return leaf
    return _like(leaf, result)


def _like(value: Any, array: Array) -> Any:
    """A result as an array of the library of *value*."""
    library = library_of(value)
    if library is not None:
        return handed(array, library)
    return array if array.ndim else array[()]
