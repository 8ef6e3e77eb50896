"""The arena: every attack against every verifier, measured.

In reading order: `verifier` (the one interface), `verifiers` (the table of them), `bench` (makes what is judged, and
judges it), `stats` (exact intervals), `report` and `plots`, `regress` (a baseline for CI), `economics`.
"""
