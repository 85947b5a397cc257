"""What one process does with the runs it owns: tasks, the heartbeat's thread, and the order in which things happen.

Decisions stand in ``protocol`` and rows in ``store``; nothing here repeats either.
"""
