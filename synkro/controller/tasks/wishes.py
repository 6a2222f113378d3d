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
        seconds, most, size = self.item_timeout, self.max_tasks, self.together
        return self._replace(
            progress=checked_bool(self.progress, "progress"),
            limit=limit if own is None else checked_seconds(own, "timeout"),
            together=None if size is None else checked_int(size, "chunksize", 1),
            retries=checked_int(self.retries, "retries", 0),
            checkpoint=path,
            item_timeout=None if seconds is None else checked_seconds(seconds, "item_timeout"),
            max_tasks=None if most is None else checked_int(most, "max_tasks", 1),
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
