"""What cannot be seen from outside: where the workers of a session are.  All looks into it are here."""


def controller(session):
    """The main process's end of the channel."""
    return session.functions.engine.channel


def whereabouts(session, rank):
    """The phase that *rank* says it is in."""
    return controller(session).whereabouts(rank)[0]


def in_phase(session, phase, rank=1):
    """A condition: whether *rank* is in *phase*."""
    return lambda: whereabouts(session, rank) == phase


def answered(session):
    """Whether all ranks have answered the last command."""
    return not controller(session).unanswered()


def marks_left(session, rank):
    """How many marks *rank* has left for traces."""
    return controller(session).marked(rank)
