"""Measure models side by side: one process per candidate, in turns, with uncertainty of the figures.

`measure.run_bench` is the entry point; `docs/bench.md` says what each figure means.
"""
