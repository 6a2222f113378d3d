"""Where the program stands, which the workers take over: its folder and its module search path."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from os import getcwd  # this one, whatever a test puts in its place

from ..errors import UsageError
from ..machine import search_path

_REMEDY = "change to one that exists, with os.chdir(path), and call this again."


def found() -> tuple[tuple[str, ...], str]:
    """The search path and the working directory of this program, both absolute.

    Functions find by them the modules and the files that they name.  Raises: UsageError without them.
    """
    try:
        folder = getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory of this program {_what(error)}, and workers are to run in it, too: "
            f"{_REMEDY}"
        ) from None
    return tuple(search_path()), folder


def enter(path: Sequence[str], folder: str) -> None:
    """In a worker: stand where the program stands.  Raises: UsageError if that cannot be."""
    sys.path[:] = path
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"the working directory of the program, {folder}, {_what(error)}, and its functions are to "
            f"run in it on the workers, too: {_REMEDY}"
        ) from None


def _what(error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError)
    return "was deleted" if missing else f"cannot be entered ({error.strerror})"
