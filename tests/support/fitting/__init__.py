"""Runs of `qtool fit`, and what it measures by hand."""
