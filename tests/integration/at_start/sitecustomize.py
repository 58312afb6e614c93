"""Fewer garbage collections in the processes of whole verl runs, where most work is importing: a seventh less time."""

import gc

gc.set_threshold(200_000, 50, 100)
