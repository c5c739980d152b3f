"""The parts of the queue, one file per kind; `bench/gpu/table.py` has a row for each."""
