"""Every decision about who owns a run, as functions from values to values.

Nothing here waits, reads a clock, draws a random number, logs or knows a database: whoever does I/O asks here what to
do and does it. Rules are cited by number (O1 …) and invariants as I1 …; a rule has one address, in this package.
"""
