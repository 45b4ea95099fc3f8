"""The weights beside those of the source."""
