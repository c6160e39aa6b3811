"""Values inside of modules."""
