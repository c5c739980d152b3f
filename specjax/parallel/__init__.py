"""Devices and processes: meshes, sharding rules, collectives and resharding."""
