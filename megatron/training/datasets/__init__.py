"""Feeding datasets to training: the order of samples, and making dataset files from text."""
