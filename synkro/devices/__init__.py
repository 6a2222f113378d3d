"""What a worker computes on: its array module, and how arrays get there and back.

base     the interface
cpu      NumPy in the worker's own memory
choice   which devices a session uses: ``devices=``, ``SYNKRO_DEVICES``, context-name maps
"""
