"""Which devices a session uses, and what its workers get to know of that.

::

    placement  what each worker gets to know, and what the user reads
    choice     ``devices=``, ``SYNKRO_DEVICES`` and context-name maps
    gpus       which GPUs there are, found out without touching them here
"""
