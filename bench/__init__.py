"""Measures what ``docs/performance.md`` promises: ``python3 dev.py bench [--quick] [NAME …]``.

Each module of ``bench.figures`` measures one figure on real databases and, where it matters, in real processes; what it
found is written to ``bench/results/``, and the page is written from there. Nothing here is part of the package.
"""
