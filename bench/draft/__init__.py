"""Measurements of draft heads and of how they are trained."""
