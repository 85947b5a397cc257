"""Upgrades of real databases: what they build, what they repair, and what interrupts them."""
