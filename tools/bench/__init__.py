"""Benchmarks. They report ratios within one run; tests assert behaviour, never times."""
