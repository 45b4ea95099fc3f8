"""How two artifacts differ."""
