"""An artifact made again from its own record, and compared."""
