"""Benchmarks of serving: load on an endpoint, and engines that take turns."""
