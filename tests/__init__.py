"""Tests of the package.

A regular package, since the wheels of verl and TransferQueue install a ``tests`` of their own that would hide ours.
"""
