"""The objects that functions bring along: each lives once on each worker, and is watched here.

::

    remembered  ``Remembered``: what the workers have of objects that no function uses any more
    walk      from a function to all objects that it reaches
    objects   ``Objects``: what the workers have of them, sent and brought up to date
    parts     what cannot be sent, and is made there by an import
    explain   why something cannot be sent
    comparison  ``Comparison``: the objects that a function's calls compare
    glances   ``Glance``: things that are compared in one go, at each call
    watch     what a function's calls compare
    words     what is said of them
"""
