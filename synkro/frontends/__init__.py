"""A user's function, made ready to travel, and on the device a callable again.

base    the interface
plain   any Python callable over arrays
"""
