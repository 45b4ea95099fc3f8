"""`qtool bench`: cases.py says what is timed, run.py times it."""
