"""Graphs of PyTensor, as functions: checked, compiled, and cut for several devices.

Only these modules import PyTensor.

::

    placed     a graph that runs once, over the devices that its variables are placed on
    cut        how such a graph is cut into parts
    graph      a graph in the classic form, and its function on a rank's rows
    programs   compiled functions of graphs, on their way to the workers
    transfers  transfers between devices, in graphs
"""
