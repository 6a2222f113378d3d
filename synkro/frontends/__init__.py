"""A user's function, made ready to travel, and on the device a callable again.

base      the interface
plain     any Python callable over arrays
pytensor  graphs of PyTensor
foreign   objects of libraries that the user has imported
settings  what the user has set in them
"""
