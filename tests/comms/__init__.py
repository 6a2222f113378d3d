"""Collectives, by each communicator."""
