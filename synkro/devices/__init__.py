"""What a worker computes on: its array module, and how arrays get there and back.

::

    cuda      a GPU, through CuPy
    gpus      which GPUs there are
    cpu       NumPy in the worker's own memory
    portions  arrays that pass through small pinned buffers
    pins      which host memory is pinned
    kept      copies of inputs that stay on the GPU from call to call
    hints     what to do after an error that comes of mixing arrays of host and GPU
    base      the interface of a device
"""
