"""Signals are taken outside of the stand-in only: the real CuPy is compiled, and nothing interrupts it.

Python would run a handler, and raise KeyboardInterrupt, in the middle of the bookkeeping here.  In a
worker a handler that is due inside of this package runs at the next step of whoever has called it.
"""

from __future__ import annotations

import dis
import os
import signal
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _caller(frame):
    """The frame that has called this package, if *frame* is inside of it."""
    outermost = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE):
            outermost = frame
        frame = frame.f_back
    return None if outermost is None else outermost.f_back


def _listens(frame):
    """Whether Python looks for signals about where *frame* is: at calls and loops, not everywhere.

    Between the end of a `with` block and its `__exit__` it does not, say.
    """
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return name.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME"))


class _Shielded:
    """A handler that waits until control is back outside."""

    def __init__(self, handler):
        self._handler = handler

    def __call__(self, number, frame):
        target = _caller(frame)
        if target is None:
            return self._handler(number, frame)

        def arm(there):
            there.f_trace, there.f_trace_opcodes = later, True

        def later(there, event, _):
            if event == "return" and there.f_back is not None:
                there.f_trace = None
                arm(there.f_back)
                return None
            if event != "opcode" or not _listens(there):
                return later
            there.f_trace = None
            sys.settrace(None)
            return self._handler(number, there)

        arm(target)
        sys.settrace(lambda *_: None)  # which makes Python look at the frames' own
        return None


def shield():
    """In a worker: from now on, also for handlers that are set later."""
    if "synkro.worker" not in sys.modules or hasattr(signal.signal, "shields"):
        return
    set_handler = signal.signal

    def set_shielded(number, handler):
        plain = not callable(handler) or isinstance(handler, _Shielded | signal.Handlers)
        return set_handler(number, handler if plain else _Shielded(handler))

    set_shielded.shields = True
    signal.signal = set_shielded
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
