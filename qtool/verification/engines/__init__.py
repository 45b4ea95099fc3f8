"""What engines load, refuse or serve slowly, by rules read from headers and configs."""
