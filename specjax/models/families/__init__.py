"""What a `model_type` means: one file each, see `specjax.interfaces.Family`."""
