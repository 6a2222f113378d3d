"""From the replies of all ranks to the user's result.

::

    collector  small outputs are merged here; large ones are transferred
    transfer   large outputs, through shared memory, by all ranks
    targets    where the user wants them: ``f.options(out=target)``
    windows    memory of the user's that the workers write to
"""
