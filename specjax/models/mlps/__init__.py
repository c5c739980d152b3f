"""Feed-forward networks of layers, one file each, see `specjax.interfaces.Mlp`."""
