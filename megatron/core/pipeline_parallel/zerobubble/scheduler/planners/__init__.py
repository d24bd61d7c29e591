"""One file per schedule; `registry.py` beside this folder gives each its name."""
