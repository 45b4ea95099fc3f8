"""Where an artifact comes from: recorded inside it, and stated beside it."""
