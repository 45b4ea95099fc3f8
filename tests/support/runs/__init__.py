"""Whole runs in this process; those that fail, die and go on."""
