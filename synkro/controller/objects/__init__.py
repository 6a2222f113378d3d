"""The objects that functions bring along: each lives once on each worker, and is watched here.

::

    known       what the workers have of an object
    registry    ``Registry``: the objects that the workers have, by number, by id, and by name
    values      arguments and items, which are values on the workers, and what they rely on
    walk        from a function to all objects that it reaches
    handover    all that the workers have, for one that takes the place of another
    objects     ``Objects``: what the workers have of them, sent and brought up to date
    parts       what cannot be sent, and is made there by an import
    explain     why something cannot be sent, and what else is said of objects
    comparison  ``Comparison``: the objects that a function's calls compare
    watch       what a function's calls compare
"""
