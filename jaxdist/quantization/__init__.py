"""Weights of few bits: how they are packed, and how they are multiplied."""
