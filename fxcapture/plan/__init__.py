"""A spec bound to modules and to the calls of one run."""
