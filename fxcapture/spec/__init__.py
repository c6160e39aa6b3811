"""What a user asks for: selectors, taps, specs, and what a model class declares."""
