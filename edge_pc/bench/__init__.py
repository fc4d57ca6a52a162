"""Measures what reuse gives on this machine: time, memory, fidelity, accuracy; one JSON report holds it all.

Each bench has settings with a `quick` size, fills one section of a `Report`, and resumes where it was interrupted.
"""
