"""Pictures of a capture."""
