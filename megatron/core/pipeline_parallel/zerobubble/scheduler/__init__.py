"""Schedules as data: plan, validate, simulate, render. Pure Python: no torch, no process groups."""
