"""What a worker computes on: its array module, and how arrays get there and back.

::

    cuda       a GPU, through CuPy
    gpus       which GPUs there are
    cpu        NumPy in the worker's own memory
    inputs     what a call is given, on its way to a GPU, through buffers, too; what of it stays there
    gathering  rows of host memory that a GPU fetches by itself
    portions   arrays in pieces that fit into such a buffer
    window     device memory that other processes open
    pins       which host memory is pinned
    context    a GPU that gets ready while CuPy is imported
    hints      what to do after an error that comes of mixing arrays of host and GPU
    base       the interface of a device
"""
