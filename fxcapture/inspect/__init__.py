"""What there is to capture, what it costs, and pictures of it."""
