"""Where the time of calls goes.

::

    picture   a trace as a picture, by matplotlib
    trace     what the user's process and every rank did, and when; as a file, and as a table
"""
