"""How a layer mixes positions: one file each, see `specjax.interfaces.Mixer`."""
