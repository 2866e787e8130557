"""Measure models beside each other: one process a candidate, taking turns, and figures with their uncertainty.

`measure.run_bench` is the entry point; `docs/bench.md` says what each figure means.
"""
