"""Models on servers, told by their headers alone."""
