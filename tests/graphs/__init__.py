"""Graphs of PyTensor."""
