"""Mesh, sharding rules, schedules and the pipeline: the only room that holds collectives."""
