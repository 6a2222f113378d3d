"""``Watch``: what a function's calls compare, to see what the program has changed since the last one.

Compared at each call, by identity: the values of all globals, defaults and cells of the function and of
the functions that came with it, and what they hold: dicts, lists, instances, small arrays, up to some
hundred entries.  What is more is looked at in call number 2, 4, 8 …, and for 2 % of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from math import inf
from time import monotonic
from types import ModuleType
from typing import Any, Final

from ...packing import kinds
from ...packing.code import is_own, is_own_name, uses
from ...packing.kinds import FUNCTION, NAME, OPAQUE, TENSOR
from ...values.foreign import is_module
from . import comparison as looks
from .comparison import Assigned, Comparison, CompiledComparison, EntryGroup
from .known import Known, Snapshot
from .walk import GLOBALS

_BUDGET = 400
"""What may be compared at each call, in units of some 25 ns: the entry of a list."""

_SHARE = 50
"""All that a function uses is looked at again when so many times has passed what that took."""

_LONG = 5000
"""Objects that a function uses up to which all are also looked at in call number 2, 4, 8 …"""

_NEVER = 1 << 62

_OFTEN = 10
"""After so many calls with nothing new it is worth while to make the comparison quicker."""


class Watch:
    """What the calls of one function compare.

    Attributes:
        comparison: what is compared at each call.
        uncompared: what is not compared at each call.
        partial: whether the function uses more than is compared at each call.
    """

    def __init__(self, roots: Sequence[Known], calls: int = 1, next_time: float = inf) -> None:
        """*calls* is the number of calls of the function so far.

        All is looked at in call number 2, 4, 8 …, and at *next_time*.
        """
        self._roots = roots
        self._calls = self._looked = calls
        self._next_time = next_time
        self._next_look = 1 << calls.bit_length()
        self._missing: list[tuple[dict[str, Any], set[str]]] = []
        self.comparison: Final = Comparison()
        self._last: list[EntryGroup] = []
        self._expired: list[EntryGroup] = []  # what it was before the next call was told to look closer
        self._quick: Callable[[], bool] | None = None
        self._unchanged = 0  # how often in a row
        self._fits = True
        self.uncompared: list[Known] = []
        self._count = 0  # of objects
        self.partial: bool = self._build()
        self._compare_with(self.comparison.groups())

    def same(self) -> bool:
        """Whether all is as the workers have it."""
        if self.partial:
            self._calls += 1
            if self._calls >= self._next_look or monotonic() >= self._next_time:
                return False
        try:
            if self._quick is not None:
                return self._quick()
            if not all(group.same() for group in self._last):
                return False
            if any(not names.keys().isdisjoint(missing) for names, missing in self._missing):
                return False
        except looks.DELETED:
            return False
        self._unchanged += 1
        if self._unchanged == _OFTEN:
            self._quick = CompiledComparison(self._last, self._missing).same
        return True

    def assigned(self) -> list[Assigned] | None:
        """The numbers and strings that are others than the workers have; None if there is more to it."""
        if self.due or (self._expired and not self._catch_up()):
            return None
        found = self._differing()
        return found if found is not None and all(map(looks.is_assigned, found)) else None

    def moved(self) -> bool:
        """Whether there may be other objects than before: more has changed than numbers and strings."""
        found = self._differing()
        return found is None or not all(
            looks.is_flat(one.value) and looks.is_flat(one.group.last[one.at]) for one in found
        )

    def _differing(self) -> list[Assigned] | None:
        """The entries that are others than before; None where something was deleted, or is new."""
        if any(not names.keys().isdisjoint(missing) for names, missing in self._missing):
            return None
        try:
            return [one for group in self._last for one in looks.differing(group)]
        except looks.DELETED:
            return None

    def _catch_up(self) -> bool:
        """After other functions have sent what they use: compare with what the workers have now.

        Returns False if it takes a closer look to know that.
        """
        if self.comparison.is_partly_unknown or not self.refresh():
            return False
        now = chain.from_iterable(known.kind.look(known.obj) for known in self.comparison.dicts)
        there = chain.from_iterable(known.contents or () for known in self.comparison.dicts)
        return all(one is other for one, other in zip_longest(now, there, fillvalue=looks.GONE))

    @property
    def due(self) -> bool:
        """Whether a look at all that the function uses is due."""
        return self.partial and (self._calls >= self._next_look or monotonic() >= self._next_time)

    def after_look(self, seconds: float) -> Watch:
        """A watch of what the function uses now, after all of it was looked at, which took so long."""
        calls = _NEVER if self._count > _LONG else max(self._calls, self._next_look)
        return Watch(self._roots, calls, monotonic() + _SHARE * seconds)

    def again(self) -> Watch:
        """A watch of what the function uses now."""
        return Watch(self._roots, self._calls, self._next_time)

    def defined(self, changed: Snapshot) -> list[Known]:
        """Functions of whose globals one is new, or another module of the user's."""
        bound = (held for known, held, _ in changed if known.kind in (NAME, FUNCTION))
        values = chain.from_iterable(held.values() for held in bound)
        if any(isinstance(value, ModuleType) and is_own(value) for value in values):
            return list(self.comparison.functions)
        spaces = [id(names) for names, missing in self._missing if not names.keys().isdisjoint(missing)]
        return [known for known in self.comparison.functions if id(known.obj.__globals__) in spaces]

    @property
    def missed(self) -> bool:
        """Whether there were calls that did not look at all, since one did."""
        return self._calls > self._looked + 1

    def expire(self) -> None:
        """The next call is to look closer."""
        self._expired = self._expired or self._last
        self._compare_with([EntryGroup(iter, (None,), [looks.GONE])])

    def look_at_all(self) -> None:
        """The next call is to look at all that the function uses."""
        self.partial, self._next_time = True, 0.0

    def refresh(self) -> bool:
        """Compare from now on with what the workers have now, at the same places.

        Returns False if objects are in other places than before: another watch has to be built.
        """
        places = self.comparison.groups()
        before = [value for place in self._expired or self._last for value in place.last]
        now = [value for place in places for value in place.last]
        self._expired = []
        self._compare_with(places)
        self._fits &= len(before) == len(now) and all(
            one is other or (looks.is_flat(one) and looks.is_flat(other))
            for one, other in zip(before, now, strict=True)
        )
        return self._fits

    def _compare_with(self, groups: list[EntryGroup]) -> None:
        self._last, self._quick, self._unchanged = groups, None, 0

    # ── built ────────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> bool:
        """Sort what the function uses; returns whether there is more than is compared."""
        missing: dict[int, tuple[dict[str, Any], set[str]]] = {}
        chosen: tuple[list[tuple[int, Known]], ...] = ([], [], [], [])
        for known, foreign in self._reached():
            self._count += 1
            if known.kind in (NAME, FUNCTION):
                self.comparison.add(known)
            elif known.kind not in (kinds.FIXED, kinds.GENERATOR):
                cost = looks.cost_of(known)
                chosen[looks.rank_of(known, foreign, cost)].append((cost, known))
            if GLOBALS in known.inner:  # a function, and not of an installed module
                code, names = known.obj.__code__, known.obj.__globals__
                missing.setdefault(id(names), (names, set()))[1].update(
                    name for name in uses(code).names if name not in names
                )
        self._missing = [entry for entry in missing.values() if entry[1]]
        left, more = _BUDGET, bool(chosen[3])
        self.uncompared += [known for _, known in chosen[3] if known.kind is not OPAQUE]
        for cost, known in chain(*chosen[:3]):
            if known.kind is not TENSOR and not looks.is_small_table(known):
                if cost > left:
                    more = True
                    self.uncompared.append(known)
                    if known.kind is not OPAQUE and is_module(known.obj):
                        self.comparison.add_scalars(known)
                    continue
                left -= cost
            self.comparison.add(known)
            unseen = known.kind in (OPAQUE, TENSOR)  # it can change so
            more |= unseen and not looks.is_small_table(known)
        return more

    def _reached(self) -> Iterator[tuple[Known, bool]]:
        """All objects, those first that fewest others lie in front of, and whether one of these is of an
        installed package."""
        seen = set(map(id, self._roots))
        level = [(known, False) for known in self._roots]
        while level:
            following = []
            for known, foreign in level:
                yield known, foreign
                inside = foreign or (
                    known.kind in (kinds.INSTANCE, kinds.STATEFUL, OPAQUE)
                    and not is_own_name(type(known.obj).__module__)
                )
                for inner in chain.from_iterable(known.inner.values()):
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        following.append((inner, inside))
            level = following
