"""Benchmarks: contenders in processes of their own, that take turns."""
