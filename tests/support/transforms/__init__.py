"""What tests of transforms share."""
