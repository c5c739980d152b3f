"""Draft sources, one file each; see `specjax.interfaces.Draft`."""

ABSORBED = 32  # pending rows that a draft runs over at a time after plain decoding
