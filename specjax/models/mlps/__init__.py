"""How a layer works on each row by itself: one file each, see `specjax.interfaces.Mlp`."""
