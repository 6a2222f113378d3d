"""Arrays and what holds them.

::

    variable  the base of all variables, in the user's process and on a worker
    arrays    values as arrays of numbers: checks and casts
    foreign   objects of other libraries, recognized without importing these
    cache     a bounded cache
    owners    whether an object has other owners than the one that asks
    random    the random generators of the ranks
"""
