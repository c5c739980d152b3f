"""Devices and processes: meshes, sharding rules, collectives, and what moves between them."""
