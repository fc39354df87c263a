"""Lives of runs at random: signals, kills, commands beside them, losses and damage.

Each life draws a config and events, ends with the same command that began it, and is
compared with a run of that config that nothing disturbed. `python -m tests.lifecycle 0
20` tries the seeds from 0 to 19.
"""
