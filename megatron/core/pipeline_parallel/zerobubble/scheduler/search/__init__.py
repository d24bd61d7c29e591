"""Search for plans: seeds, double justification, periodic extension, lower bounds."""
