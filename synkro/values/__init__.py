"""Arrays and what holds them.

::

    variable  what every variable is, in the user's process and on a worker
    arrays    values as arrays that have arithmetic: checks and casts
    foreign   objects of other libraries, recognized without importing these
    cache     a bounded cache
    random    the random generators of the ranks
"""
