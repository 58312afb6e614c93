"""Trainer hooks: the only code of the package that imports a framework."""
