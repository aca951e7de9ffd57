"""Weights on the mesh of a server, laid out and multiplied as its backend wants."""
