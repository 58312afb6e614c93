"""Puts ``pkg://equipoise.conf`` on the search path of every Hydra application."""
