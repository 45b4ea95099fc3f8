"""Hubs and other servers on loopback."""
