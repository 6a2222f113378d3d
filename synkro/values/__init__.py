"""Arrays and what holds them.

::

    variable  the base of all variables, in the user's process and on a worker
    arrays    values as arrays of numbers: checks and casts
    foreign   objects of other libraries, recognized without importing these
    cache     a bounded cache
    random    the random generators of the ranks
"""
