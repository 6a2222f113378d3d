"""A user's function made ready to travel, and a callable again on the other side.

::

    pickles   any Python callable over arrays, by cloudpickle
    pytensor  graphs of PyTensor
    numba     functions of numba, compiled once for all workers
    refused   what cannot travel, and what to do instead
    settings  what the user has set in the libraries
"""
