"""Hooks into trainers: the only rooms of the package that import a framework."""
