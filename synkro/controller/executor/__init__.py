"""Executors: a future for each task, for the libraries that take a pool.

::

    executor   ``Executor``, what users hold: submit, map, shutdown
    pool       its workers, and the thread that hands tasks to them
    arguments  functions and arguments on their way to a task, by value
    joblib     the same workers as a backend of joblib's
"""
