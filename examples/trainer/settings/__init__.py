"""What can be chosen: the settings of a run, the presets and recipes, and the command line."""
