"""The command line: one file per command, one place where errors are printed (`main`)."""
