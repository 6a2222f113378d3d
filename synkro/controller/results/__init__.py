"""From the replies of all ranks to the user's result.

::

    collector  small outputs are merged here; large ones are transferred
    transfer   large outputs, through shared memory, by all ranks, or straight to memory of the user's
    targets    where the user wants them: ``f.options(out=target)``
"""
