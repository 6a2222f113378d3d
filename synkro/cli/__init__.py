"""``python -m synkro``.

::

    commands  the commands, and ``bench``
    doctor    what works on this machine, tried out
    info      what this machine has
    ctrl_c    how a command ends when it is interrupted
"""
