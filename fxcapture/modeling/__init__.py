"""Decorators for the authors of model classes."""
