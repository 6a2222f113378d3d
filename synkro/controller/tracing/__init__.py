"""Where the time of calls goes.

::

    timeline  a trace as a file, a table and a picture
    trace     what the user's process and every rank did, and when
"""
