"""Tests that start other programs."""
