"""Measures what reuse gives on this machine, and compares machines; one JSON report holds all numbers.

`benches.py` is the table of what can be run. A bench (`work.Bench`) fills one section of a report with typed rows and
registers the tables that follow from them; pages show whatever tables a report holds.
"""
