"""One module per on-disk format."""
