"""Where the time of calls goes.

::

    picture   a trace as a picture, by matplotlib
    timeline  a trace as a file and a table
    trace     what the user's process and every rank did, and when
"""
