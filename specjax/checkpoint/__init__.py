"""Checkpoints in the layouts of Orbax and Hugging Face, and conversion between them."""
