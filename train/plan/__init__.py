"""What a run of `train.rl` needs of chips: `python -m train.plan`, see `__main__`."""
