"""Costs of rounds of decoding as the TPU compiler estimates them: `python -m bench.tpu`."""
