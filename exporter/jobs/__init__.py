"""The kinds of exports: what each opens, traces, compares with and records. `exporter/pipeline.py` does the rest."""
