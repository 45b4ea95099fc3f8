"""Many artifacts of one model, from one download and one calibration pass."""
