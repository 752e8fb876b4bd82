"""Trainings that the paper's code did, repeated by the trainer and compared step by step."""
