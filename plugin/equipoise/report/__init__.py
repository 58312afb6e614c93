"""Simulations and measurements as tables and plots."""
