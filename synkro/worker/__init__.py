"""A worker process: everything here runs in a worker (``group`` also in ``as_serial``).

::

    begin        what comes first: the worker ends with the main process
    loop         receive a command, do it, reply; what this process logs goes to the main program
    rank         what one rank does: a handler for each command; a run that has failed, once more
    workspace    what one rank has: functions, variables, objects, memory, a device
    call         one call of one function on this rank's rows
    reading      inputs in files: rows, read one piece ahead
    safekeeping  what a rank keeps for the case that a worker dies
    tasks        a map: one item of a queue after the other
    merging      the outputs of a call: merged over its slices, laid out in the outbox
    group        the ranks of a running call, as the function sees them
    recorded     what collectives have given, for a replay
    world        some of these ranks, with collectives of their own
    autograd     the gradients of collectives, for PyTorch's tensors
    objects      the objects that functions have brought along, on this worker
    terminal     what asks for input in a worker asks the user, and lines end with tasks
    variables    what commands do with the variables of one rank
    scene        what a function that has failed needs, copied for the main program
    copying      how results and objects are pickled
    replica      ``Replica``: one rank's replica of a variable
"""
