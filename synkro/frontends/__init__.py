"""A user's function, made ready to travel, and on the device a callable again.

base      the interface
plain     any Python callable over arrays
pytensor  graphs of PyTensor
refused   what cannot travel, and what to do instead
settings  what the user has set in them
"""
