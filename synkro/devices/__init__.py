"""What a worker computes on: its array module, and how arrays get there and back.

base      the interface
cpu       NumPy in the worker's own memory
cuda      a GPU, through CuPy
pins      which host memory is pinned for it
portions  arrays that pass through small pinned buffers
hints     what to do where arrays of the host and of the GPU met
kept      which inputs it still has a copy of
gpus      which GPUs there are, found out without touching them here
choice    which devices a session uses: ``devices=``, ``SYNKRO_DEVICES``, context-name maps
placement what each worker gets to know of that, and what the user reads
"""
