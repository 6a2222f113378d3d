"""Random numbers in graphs of PyTensor, whose versions 2 and 3 differ in that."""

import contextlib
import warnings


def random_draw(kind, *args, **kwargs):
    """The stream's next state, which version 2 hides, and what is drawn."""
    try:
        return kind(*args, return_next_rng=True, **kwargs)
    except TypeError:
        return kind(*args, **kwargs).owner.outputs


@contextlib.contextmanager
def default_updates():
    """They may be assigned to here, which version 3 calls deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*default_update", DeprecationWarning)
        yield
