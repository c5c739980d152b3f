"""What the TPU compiler says of rounds of decoding, without a TPU: `python -m bench.tpu`."""
