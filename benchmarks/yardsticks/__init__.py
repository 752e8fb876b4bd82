"""Yardsticks that nobody here wrote, with their published figures."""
