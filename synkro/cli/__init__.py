"""``python -m synkro``.

::

    commands  the commands, and ``bench``
    doctor    checks that try out what works on this machine
    hosts     checks that hosts can work together
    info      what this machine has
    ctrl_c    how a command ends when it is interrupted
"""
