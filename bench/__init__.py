"""Benchmarks. Each prints its results and writes them under bench/results."""
