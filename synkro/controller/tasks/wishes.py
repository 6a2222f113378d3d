"""How a map is to go, as its arguments say."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ...errors import InvalidType, InvalidValue, shortened
from ...values.arrays import checked_bool, checked_int, checked_seconds
from ..calls.function import Options


class Wishes(NamedTuple):
    """How a map is to go, as its arguments say; *limit* is in seconds.

    *ends_by_death*: if a worker dies that was not to end, so does the map, though others go on.
    """

    progress: bool
    limit: float | None
    together: int | None
    retries: int
    errors: str
    checkpoint: Any
    item_timeout: float | None
    max_tasks: int | None
    ends_by_death: bool = False

    def checked(self, fn: Any, limit: float | None) -> Wishes:
        """Wishes that were checked; where no limit is said, that of *fn* counts, or *limit*.

        Raises: InvalidType, InvalidValue.
        """
        own = fn.timeout if self.limit is None and isinstance(fn, Options) else self.limit
        if self.errors not in ("raise", "return"):
            raise InvalidValue(f'errors= is "raise" or "return"; got {shortened(self.errors)}.')
        path = self.checkpoint
        try:
            path = None if path is None else os.fsdecode(path)
        except TypeError:
            raise InvalidType(
                f'checkpoint= takes the path of a file, such as "run1.synk"; got {shortened(path)}.'
            ) from None
        return Wishes(
            checked_bool(self.progress, "progress"),
            limit if own is None else checked_seconds(own, "timeout"),
            None if self.together is None else checked_int(self.together, "chunksize", 1),
            checked_int(self.retries, "retries", 0),
            self.errors,
            path,
            None if self.item_timeout is None else checked_seconds(self.item_timeout, "item_timeout"),
            None if self.max_tasks is None else checked_int(self.max_tasks, "max_tasks", 1),
            self.ends_by_death,
        )

    @property
    def returned(self) -> bool:
        """Whether exceptions of tasks are results."""
        return self.errors == "return"

    @property
    def needs_new_workers(self) -> bool:
        """Whether workers are to end before the session does."""
        return self.item_timeout is not None or self.max_tasks is not None

    @property
    def outlives(self) -> bool:
        """Whether a map goes on when a worker has died."""
        return self.goes_on or self.needs_new_workers

    @property
    def goes_on(self) -> bool:
        """Whether the workers go on after a task that has failed."""
        return self.returned or self.retries > 0
