"""``python -m synkro``, or ``synkro`` where it is installed."""

import os
import sys

from .cli import ctrl_c


def run() -> int:
    """The command; returns its status, also where its output could not be written."""
    from .cli.commands import main  # noqa: PLC0415  what takes a while is interrupted in here

    if sys.stdout is None:  # closed: there is the exit status still
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # who read it has seen enough, or there is no room
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
        if not isinstance(error, BrokenPipeError):
            print(f"Synkro: the output could not be written: {error.strerror}.", file=sys.stderr)
    return status


def main() -> int:
    """The command ``synkro``; returns its status, also after Ctrl-C."""
    return int(ctrl_c.status_of(run))


if __name__ == "__main__":
    sys.exit(main())
