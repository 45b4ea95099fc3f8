"""`qtool quantize`, `qtool plan` and `qtool calibrate`, from what was asked to what is made."""
