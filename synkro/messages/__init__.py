"""The commands and replies: the only vocabulary between the main process and its workers.

Every command goes to every rank, or to those of a lane (``ipc.channel``), and a rank answers each with
exactly one reply.

    Start       → Started here is who you are and where you run
    Distribute  → Ack     load these functions
    Renew       → Ack     put these contents into objects that functions have brought along
    Assign      → (the reply to the command after it)  put these numbers and strings into such objects
    Compare     → Compared  say which of these objects you have changed
    Fetch       → Copied  return a copy of an object
    Replay      → Copied  return a copy of what a function needs that has failed
    Changes      → Changed  say which of all objects functions have changed, and a digest of each
    Copy        → Copied  return what such objects hold, for a worker that takes the place of another
    Preserve    → Ack     keep what objects and variables hold, or put it back
    Call        → Done    run a function on your rows
    Work        → Ack     run a function on items of a queue until there are no more
    Keep        → Ack     keep outputs of the last call as these variables
    Create      → Ack     these variables exist from now on
    Move        → Ack     send a replica to another rank, or receive it
    Write       → Ack     put these rows into your replicas
    Read        → Done    return your replicas, as if they were outputs of a function
    Inspect     → Shapes  return the shapes of your replicas
    Identify    → Identity  return the digest of your replica
    Exchange    → Ack     take part in a collective over your replicas
    Secure      → Secured put your replicas where they outlive you, and say where
    Revert      → Ack     be as when your replicas and objects were kept
    Restore     → Ack     these variables exist from now on, as they were on the worker before
    Initialize  → Ack     call a function that prepares you
    Reseed      → Ack     seed all your random generators
    Generator   → GeneratorState  return the state of your random generator, or set it
    Store       → Ack     copy outputs of the last call into shared memory
    Reduce      → Ack     reduce your share of what all ranks have stored
    Export      → Exported  write your share of an array in shared memory to a file
    Deliver     → (the reply that was too long)
    Indirect    → (the reply to the command that it points to)
    Release     → Ack     do the housekeeping, and nothing else
    Exit        → no reply: the worker ends

Any command may be answered by Failed, and a reply that does not fit its place by TooLong.

::

    base       the bases, and the replies that any command may get; memory, long commands and replies
    life       how a session begins and ends, and its random generators
    objects    functions, and the objects that they bring along
    calls      calls and maps, and what becomes of their outputs
    variables  variables, and collectives over their replicas
"""

from .base import *
from .calls import *
from .life import *
from .objects import *
from .variables import *
