"""Capture in graphs that were made elsewhere."""
