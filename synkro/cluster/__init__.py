"""Several hosts: what travels between them.

::

    traffic  what a command reads and writes on the ranks of one host
"""
