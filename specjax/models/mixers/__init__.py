"""Mixers of layers, such as attention, one file each, see `specjax.interfaces.Mixer`."""
