"""The GPU queue: measurements on a Hopper GPU, in parts of a few minutes each.

`python -m bench.gpu --help` says how it is used; `table.py` lists the parts and their targets.
"""
