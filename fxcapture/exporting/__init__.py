"""Captured programs: export, save, load, package."""
