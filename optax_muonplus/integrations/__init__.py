"""Entries for hosts that want more than an Optax transformation, imported when they are used."""
