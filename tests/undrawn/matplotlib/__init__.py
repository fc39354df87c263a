"""Stands for matplotlib in the commands that tests start, and draws nothing.

Drawing a report takes a quarter of a short run; tests of reports have the real one.
"""
