"""Entries for hosts that want more than an Optax transformation. A host is imported when it is used."""
