"""Errors, exit statuses, files and optional packages: needed everywhere, about no model."""
