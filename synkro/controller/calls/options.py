"""``Options``: a function with options of its calls, as ``f.options(timeout=2.0)`` gives it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .function import Function


@dataclass(frozen=True)
class Options:
    """A function, to be called with options; made by ``Function.options``.

    Attributes:
        function: the function.
        timeout: seconds that a call may take; None for what ``fork(timeout=)`` says.
    """

    function: Function
    timeout: float | None

    def __reduce__(self) -> Any:
        return self.function.__reduce__()  # on the workers it is the plain function

    def __copy__(self) -> Options:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return Options(copy.deepcopy(self.function, memo), self.timeout)

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; arguments, result and errors are those of a plain call."""
        return self.function.call_within(self.timeout, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background, as ``Function.submit``; the time counts from when the call runs."""
        return self.function.submit_as(self, args, kwargs)
