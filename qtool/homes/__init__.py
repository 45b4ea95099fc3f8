"""Where models lie that people already have, and what other programs call them."""
