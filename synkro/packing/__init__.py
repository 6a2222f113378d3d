"""A user's function pickled for the workers, and a callable again there; tracebacks for the way back.

::

    pickles     any Python callable over arrays, by cloudpickle
    pytensor    graphs of PyTensor
    numba       functions of numba, compiled once for all workers
    refused     what cannot be sent to the workers, and what to do instead
    settings    settings of libraries, which the workers take over
    place       working directory and search path, which they take over, too
    exceptions  exceptions of the workers, on their way to the main process
    tracebacks  what is shown of them there
"""
