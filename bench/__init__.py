"""Measurements. Each prints what it found and writes it under bench/results."""
