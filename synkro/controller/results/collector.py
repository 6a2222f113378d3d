"""From the replies of all ranks to the user's result.

Each output of each rank lies either in the rank's outbox (it is small: this process merges them) or
still in the worker (it is large).  Large outputs take two more steps, in which all ranks work::

    workers' memory ─ Store ─▶ stages, one a rank ─ Reduce, each rank its share ─▶ result segment
                    └ Store, for what is gathered, straight to its place ────────▶ result segment

The first rank of a host has no stage for what is reduced: it stores that in the result segment.  The
result is a view of that segment, not a copy.  In place of the segment there may be
a ``target``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from ...errors import OutputError, counted, cut, reason
from ...messages import Done, KeptOutput, Leaf
from ...packing.pickles import HEAD, INTEGER, PICKLED
from ...packing.refused import advice_on_loading
from ...plan import outputs as plans
from ...plan.call import CallPlan, Survey
from ...plan.split import slices_of
from ...values.arrays import Array, longer
from ...values.cache import Cache
from .targets import InMemory, OpenTargets, Target
from .transfer import Leaves, Outputs, Transfer

_SHAPES = (
    ' To concatenate rows say outputs="gather"; to reduce them, return as many on every rank '
    "(np.bincount, say, with minlength=)."
)


_ONE_LIST = "outputs=lambda a, b: a + b"


class Integers:
    """Merges integers of Python's: to one of NumPy's, or where 64 bits do not hold it, of Python's."""

    def __init__(self, mode: str) -> None:
        self._merge: Callable[[int, int], int] = plans.WHOLE[mode]

    def __call__(self, values: Iterable[int]) -> Any:
        merged = functools.reduce(self._merge, values)
        for kind in (np.int64, np.uint64):
            if np.iinfo(kind).min <= merged <= np.iinfo(kind).max:
                return kind(merged)
        return merged


def _is_integer(leaf: Leaf) -> bool:
    """Whether *leaf* is one integer, of Python's or NumPy's."""
    return leaf.dtype == INTEGER or (np.dtype(leaf.dtype).kind in "iu" and leaf.pieces[0].shape == ())


def _native(leaf: Leaf) -> np.dtype[Any]:
    native: np.dtype[Any] = np.dtype(leaf.dtype).newbyteorder("=")
    return native


@dataclass(eq=False, repr=False)
class Collection:
    """From the replies to one call to its result; serves as long as the replies are the same.

    *replies* are by rank; *keep* makes the handles of outputs that stay on the workers; *load* reads
    pickles.

    Raises: OutputError if the ranks' outputs do not fit each other.
    """

    _home: Outputs
    _name: str
    _spec: Any
    _plan: CallPlan | Survey
    replies: Sequence[Done] | Mapping[int, Done]
    _keep: Callable[[Sequence[KeptOutput], tuple[int, ...]], Sequence[Any]]
    _load: Callable[[bytes, Iterable[Any]], Any] | None = None
    _transfers: Cache[tuple[Any, ...], Transfer] = field(default_factory=Cache)

    def __post_init__(self) -> None:
        plan = self._plan
        self._spec = plans.modes_of(plan.subset, self._spec)
        self._nothing = isinstance(self._spec, tuple | list | dict) and not self._spec
        self._tree = self.replies[plan.participants[0]].tree
        self._outputs = [] if self._nothing else self._match()
        self._total_weight = plan.total_weight
        one = self._tree is None and self._spec is not None and not self._nothing
        self._one = self._outputs[0] if one and self._outputs[0].views else None

    def _match(self) -> list[Leaves]:
        ranks, tree = self._plan.participants, self._tree
        for rank in ranks:
            if (other := self.replies[rank].tree) != tree:
                raise OutputError(
                    f"the function {self._name!r} returned {plans.describe(tree)} on rank {ranks[0]}, "
                    f"but {plans.describe(other)} on rank {rank}: it must return the same on every rank."
                    f"{plans.advice_on_keys(tree, other)}"
                    f"{f' For one list say {_ONE_LIST}.' * bool(self._listed())}"
                )
        modes = plans.leaf_modes(self._spec, self._tree)
        paths = plans.leaf_paths(self._tree)
        by_output = zip(*[self.replies[rank].leaves or () for rank in ranks], strict=True)
        return [
            self._checked(mode, path, list(zip(ranks, leaves, strict=True)))
            for mode, path, leaves in zip(modes, paths, by_output, strict=True)
        ]

    def _checked(self, mode: Any, path: str, leaves: list[tuple[int, Leaf]]) -> Leaves:
        """One output, whose *leaves* are beside their ranks."""
        pieces = [
            (rank, number, piece) for rank, leaf in leaves for number, piece in enumerate(leaf.pieces)
        ]
        first_rank, first = leaves[0]
        pickled = [leaf.dtype == PICKLED for _, leaf in leaves]
        if mode == "gather" and any(pickled) and not all(pickled):
            rank = leaves[pickled.index(True)][0]
            raise OutputError(
                f"output{cut(path)} of the function {self._name!r} is a list on rank {rank}, but no "
                f'list on rank {leaves[pickled.index(False)][0]}: "gather" needs the same on every rank.'
            )
        of_python = mode in plans.WHOLE and any(leaf.dtype == INTEGER for _, leaf in leaves)
        if of_python and all(_is_integer(leaf) for _, leaf in leaves):
            mode = Integers(mode)
        dtype = np.dtype(first.dtype)
        if not (mode is None or callable(mode) or any(pickled)):
            by_rows = mode in ("gather", "keep")
            start = 1 if by_rows else 0  # of the dimensions that have to be the same
            for rank, leaf in leaves:
                same = leaf.dtype == first.dtype
                if not same and mode == "gather" and (both := longer(dtype, np.dtype(leaf.dtype))):
                    dtype, same = both, True
                for piece in leaf.pieces:
                    ours, theirs = first.pieces[0].shape, piece.shape
                    if not same or ours[start:] != theirs[start:]:
                        rows = " but for the first dimension" if by_rows else ""
                        hint = "" if by_rows else _SHAPES
                        raise OutputError(
                            f"output{cut(path)} of the function {self._name!r} has shape {ours} and "
                            f"dtype {_native(first)} on rank {first_rank}, but {theirs} and "
                            f'{_native(leaf)} on rank {rank}: "{mode}" needs the same dtype, and '
                            f"the same shape{rows}.{hint}"
                        )
        inside = all(piece.offset is not None for _, _, piece in pieces)
        views = [self._home.in_outbox(rank, piece) for rank, _, piece in pieces] if inside else []
        return Leaves(mode, dtype, pieces, views)

    def warning(self, of_graph: bool) -> str:
        """What there is to say about outputs that look like rows, or counts, and are averaged, as nobody
        said how to reduce them, or about a list that looks like rows, and is none; empty for nothing."""
        plan = self._plan
        if isinstance(plan, Survey) or len(plan.participants) == 1:
            return ""
        spans = [plan.spans[rank] for rank in plan.participants]
        lengths = {stop - start for span in spans for start, stop in slices_of(span, plan.slices)}
        rows = max(lengths)
        like = [
            isinstance(output.mode, plans.Default) and output.pieces[0][2].shape[:1] == (rows,)
            for output in self._outputs
        ]
        if len(lengths) == 1 and self._listed() == rows:
            return (
                f"the function {self._name!r} returned a list of {counted(rows, 'array')} on every "
                f'rank, as many as the rank got rows, and outputs= is "gather": the arrays of the ranks '
                f"were concatenated, entry by entry. For one list of all rows say {_ONE_LIST}; if the "
                f"list is of several outputs, return a tuple, which silences this."
            )
        if rows == 1 or len(lengths) > 1 or not any(like):
            return self._warning_of_counts(of_graph)
        path, more = plans.leaf_paths(self._tree)[like.index(True)], sum(like) - 1
        cure, silence = 'say outputs="gather"', 'outputs="mean"'
        if of_graph:
            cure, silence = 'say (y, "gather") for this variable y in outputs=', '(y, "mean")'
        elif not all(like):
            cure = 'give outputs= an entry for each output, "gather" for this one'
        got = "got in a slice" if plan.slices > 1 else "got"
        return (
            f"output{cut(path)}{f' (and {more} more)' if more else ''} of the function {self._name!r} "
            f"has {rows} rows on every rank, as many as the rank {got}, and outputs= was not given: the "
            f"ranks' arrays are averaged. To concatenate their rows {cure}; if the average is meant say "
            f"{silence}, which silences this."
        )

    def _listed(self) -> int:
        """How long the list is, if the outputs are a list of arrays to gather; else 0."""
        tree = self._tree
        return len(tree.children) if self._spec == "gather" and tree and tree.kind is list else 0

    def _warning_of_counts(self, of_graph: bool) -> str:
        counts = [isinstance(o.mode, plans.Default) and o.dtype.kind in "iu" for o in self._outputs]
        if not any(counts):
            return ""
        said = '(y, "%s")' if of_graph else 'outputs="%s"'
        path = plans.leaf_paths(self._tree)[counts.index(True)]
        return (
            f"output{cut(path)} of the function {self._name!r} is an integer, and outputs= was not "
            f"given: the ranks' integers are averaged. For a count say {said % 'sum'}; if the "
            f"average is meant say {said % 'mean'}, which silences this."
        )

    # ── the result ───────────────────────────────────────────────────────────────────────────────

    def foresee(self, targets: OpenTargets) -> None:
        """Raises: OutputError if outputs like these do not fit the *targets* of another call."""
        targets.fitting(self._name, self._tree, self._outputs, foreseen=True)

    def result(self, targets: OpenTargets | None = None) -> Any:
        """Merge the outputs of the ranks into new memory, nested as the function returned them.

        In the place of an output that goes to one of *targets* stands that.
        """
        if self._one is not None and targets is None:
            return self._merge(self._one)
        if self._nothing:
            return None
        if targets is None:
            return self._merged({})
        taking = targets.fitting(self._name, self._tree, self._outputs)
        try:
            return self._merged(taking)
        finally:
            for target in taking.values():
                target.touch()

    def _merged(self, taking: Mapping[int, Target]) -> Any:
        """The result, after outputs went to the targets that are *taking* them."""
        merged: list[Any] = [None] * len(self._outputs)
        waiting, kept = [], []
        for index, output in enumerate(self._outputs):
            target = taking.get(index)
            if output.mode == "keep":
                number, piece = self._home.engine.directory.number(), output.pieces[0][2]
                kept.append(KeptOutput(index, number, piece.shape[1:], piece.dtype))
            elif output.views and target is None:
                merged[index] = self._merge(output)
            elif output.views and isinstance(target, InMemory):
                target.fill(output.views)
                merged[index] = target.value
            else:
                waiting.append(index)
        if kept:
            for keeping, handle in zip(kept, self._keep(kept, self._plan.world), strict=True):
                merged[keeping.leaf] = handle
        if waiting:
            for index, value in zip(waiting, self._fetch(waiting, taking), strict=True):
                merged[index] = value
        return plans.assemble(self._spec, self._tree, iter(merged))

    def _merge(self, output: Leaves) -> Any:
        """Merge a leaf whose pieces lie in outboxes."""
        operation, views = output.operation, output.views
        if operation is None:
            if output.is_one_array:
                return np.concatenate(views, dtype=output.dtype)
            return self._joined(output.mode, [view.copy() for view in views])
        value: Any = views[0]
        if not value.ndim:  # NumPy makes scalars of arrays without dimensions by itself
            value = value[()]
            for view in views[1:]:
                value = operation.ufunc(value, view)
            if operation.weighted and self._total_weight != 1:
                value = np.true_divide(value, self._total_weight)
            return value if value.dtype == output.result else output.result.type(value)
        value = operation.merge(value, views[1]) if len(views) > 1 else value.copy()
        for view in views[2:]:
            operation.merge(value, view, out=value)
        value = operation.finish(value, self._total_weight, out=value)
        return value.astype(output.result, copy=False)

    def _joined(self, mode: Any, arrays: Sequence[Array]) -> Any:
        """The output of which *arrays* are the pieces, in their order, with pickles among them."""
        values = list(self._values(arrays))
        if mode == "gather":
            return list(chain.from_iterable(values))
        if isinstance(mode, Integers):
            return mode(map(int, values))
        return functools.reduce(mode, values) if callable(mode) else values

    def _values(self, arrays: Sequence[Array]) -> Iterator[Any]:
        """What the function returned: for each piece an array, a number, or what was pickled."""
        remaining = iter(arrays)
        for array in remaining:
            if array.dtype != PICKLED:
                yield int(array) if array.dtype == INTEGER else array[()]
                continue
            assert self._load is not None
            head = array.tobytes()
            buffers = [next(remaining) for _ in range(int.from_bytes(head[:HEAD], "little"))]
            try:
                yield self._load(head[HEAD:], buffers)
            except MemoryError:
                raise
            except Exception as error:
                raise OutputError(
                    f"what the function {self._name!r} returned cannot be unpickled here: "
                    f"{reason(error)}. {advice_on_loading(error)}"
                ) from error

    def _fetch(self, waiting: Sequence[int], taking: Mapping[int, Target]) -> list[Any]:
        """Fetch leaves, those that still wait in the workers: through shared memory, by all ranks."""
        home, plan = self._home, self._plan
        lane = home.engine.channel.lane(plan.world)
        straight = {
            index: target.place
            for index, target in taking.items()
            if index in waiting and target.place and target.dtype == self._outputs[index].dtype
        }
        key = (*waiting, None, *straight)
        if key not in self._transfers:
            outputs = {index: self._outputs[index] for index in waiting}
            self._transfers[key] = Transfer(
                home, self._total_weight, plan.participants, lane, outputs, plan.nccl, tuple(straight)
            )
        found, lent = self._transfers[key].run(straight)
        arrays = [[placed.segment.array(placed.region) for placed in some] for some in found]
        results: list[Any] = []
        for index, some, placed in zip(waiting, arrays, found, strict=True):
            output = self._outputs[index]
            if index in taking:
                if index not in straight:
                    taking[index].receive(placed[0], home.engine, lane)
                results.append(taking[index].value)
                continue
            own = some if lent else [array.copy() for array in some]
            whole = output.operation is not None or output.is_one_array
            results.append(
                own[0].astype(output.result, copy=False) if whole else self._joined(output.mode, own)
            )
        return results
