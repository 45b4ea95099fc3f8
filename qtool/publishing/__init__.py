"""An artifact sent to a hub."""
