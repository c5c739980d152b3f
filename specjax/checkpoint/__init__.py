"""Checkpoints in Orbax's and in Hugging Face's layout, and weights moved between the two."""
