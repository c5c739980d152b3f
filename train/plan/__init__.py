"""Predicts memory and speed of a run of `train.rl` on given chips: `python -m train.plan`."""
