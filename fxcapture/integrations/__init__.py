"""Other libraries' models over this package; each module imports its library."""
