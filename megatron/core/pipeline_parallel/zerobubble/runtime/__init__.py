"""Runs plans: one executor, its channels, and the compute of one stage."""
