"""A user's function pickled for the workers, and a callable again there; tracebacks for the way back.

::

    pickles      streams of functions, by cloudpickle, and of the objects that they bring along
    together     many values that hold little, pickled as one
    kinds        what an object of each kind holds
    code         what the code of a function names
    imported     what cannot travel of modules, and is made by an import
    pytrees      classes that are registered with JAX
    numba        functions of numba, compiled once for all workers
    refused      what cannot be sent to the workers, and what to do instead
    futures      a task of an executor, and what its arguments are made of again
    fingerprint  digests of functions and values, the same in each run of a program
    scene        what a function needs to run once more in the main program
    settings     settings of libraries, which the workers take over
    place        working directory and search path, which they take over, too
    failures     exceptions of the workers, and their tracebacks, on the way to the main process
"""
