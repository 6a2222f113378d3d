"""What a worker computes on: its array module, and how arrays get there and back.

::

    cuda      a GPU, through CuPy
    cpu       NumPy in the worker's own memory
    portions  arrays that pass through small pinned buffers
    pins      which host memory is pinned
    kept      which inputs the GPU still has a copy of
    hints     what to do where arrays of the host and of the GPU met
    base      the interface of a device
"""
