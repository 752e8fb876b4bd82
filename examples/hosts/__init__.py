"""Muon+ in other people's trainers: each file is what a user adds, and a tiny run of it."""
