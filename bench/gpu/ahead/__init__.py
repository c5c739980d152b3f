"""Costs of rounds of decoding on GPUs, as XLA compiles them: `python -m bench.gpu.ahead`."""
