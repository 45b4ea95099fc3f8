"""`python -m qtool`: the same as the `qtool` command."""

from qtool.cli.main import process

process()
