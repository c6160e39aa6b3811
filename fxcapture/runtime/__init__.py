"""Running a compiled model with its capture: programs, compiled graphs, calls."""
