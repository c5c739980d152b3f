"""What proposes tokens, one file each; see `specjax.interfaces.Draft`."""

ABSORBED = 32  # rows that a draft takes in at a time when it catches up
