"""What a worker computes on: its array module, and how arrays get there and back.

base     the interface
cpu      NumPy in the worker's own memory
cuda     a GPU, through CuPy
pins     which host memory is pinned for it
portions inputs that pass through small pinned buffers
gpus     which GPUs there are, found out without touching them here
choice   which devices a session uses: ``devices=``, ``SYNKRO_DEVICES``, context-name maps
"""
