"""What localattn costs, measured: `python -m benchmarks` from the repository's root.

Needs `pip install -e ".[cpu,bench]"`. Results go to `benchmarks/results/`, a folder for
each processor, the figures to `docs/images/`.
"""
