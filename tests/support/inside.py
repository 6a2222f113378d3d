"""What cannot be seen from outside: where the workers of a session are.  All looks into it are here."""

import sys
import threading

from synkro.ipc import process


def controller(session):
    """The main process's end of the channel."""
    return session.services.engine.channel


def everyone(session):
    """Its lane of all ranks."""
    return controller(session).everyone


def whereabouts(session, rank):
    """The phase that *rank* says it is in."""
    return controller(session).whereabouts(rank)[0]


def in_phase(session, phase, rank=1):
    """A condition: whether *rank* is in *phase*."""
    return lambda: whereabouts(session, rank) == phase


def main_thread_in(function):
    """A condition: whether the main thread is in *function*."""

    def condition():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    return condition


def answered(session):
    """Whether all ranks have answered the last command."""
    return not everyone(session).unanswered()


def marks_left(session, rank):
    """How many marks *rank* has left for traces."""
    return controller(session).marked(rank)


def say_ties():
    """From now on this process prints a line when it has tied a worker to its own life."""
    tie = process._tie

    def tied(*args):
        tie(*args)
        print("tied", flush=True)

    process._tie = tied
