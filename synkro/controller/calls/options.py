"""``Options``: a function with options of its calls, as ``f.options(timeout=2.0)`` gives it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InvalidValue, check_keywords
from ...plan.binding import RESERVED
from ...values.arrays import checked_seconds
from ..results.targets import Destinations

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .function import Function


@dataclass(frozen=True)
class Options:
    """A function, to be called with options; made by ``Function.options``.

    Attributes:
        function: the function.
        timeout: seconds that a call may take; None for what ``fork(timeout=)`` says.
        out: where gathered outputs go; None for new memory.
    """

    function: Function
    timeout: float | None
    out: Destinations | None = None

    def __reduce__(self) -> Any:
        return self.function.__reduce__()  # on the workers it is the plain function

    def __copy__(self) -> Options:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return Options(copy.deepcopy(self.function, memo), self.timeout, self.out)

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function.name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"options are of calls, f.options(…)(x) and f.options(…).submit(x), and have no {name!r}: "
            f"use the function without them, f.{name}."
        )

    def options(self, **later: Any) -> Options:
        """The function with these options and its own, of which the later ones win."""
        new = self.function.options(**later)
        timeout = new.timeout if "timeout" in later else self.timeout
        return Options(self.function, timeout, new.out if "out" in later else self.out)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; arguments, result and errors are those of a plain call."""
        return self.function.call_within(self.timeout, args, kwargs, self.out)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background, as ``Function.submit``; the time counts from when the call runs."""
        return self.function.submit_as(self, args, kwargs)


def options_of(
    function: Function, timeout: Any, out: Any, unknown: dict[str, Any], placed: bool
) -> Options:
    """A function with options; it is *placed* if it is a graph over several devices.

    Raises: InvalidType, InvalidValue.
    """
    where = {name: f"options(…)(x, {name}=…), as an argument of the call" for name in RESERVED}
    for name in unknown:
        check_keywords("options()", [name], ["timeout", "out"], where.get(name, ""))
    seconds = None if timeout is None else checked_seconds(timeout, "timeout")
    if out is not None and placed:
        raise InvalidValue(
            f"out= takes the rows of all ranks, and the graph of {function.name!r} runs once, over its "
            f"devices: take the result, and then target[...] = result."
        )
    return Options(function, seconds, None if out is None else Destinations(out))
