"""JSON Schemas of what the commands print with --json, one file each."""
