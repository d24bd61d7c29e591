"""Pure functions that turn a validated plan into what the ranks execute."""
