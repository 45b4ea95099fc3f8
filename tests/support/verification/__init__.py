"""Damage, and what `qtool verify` finds."""
