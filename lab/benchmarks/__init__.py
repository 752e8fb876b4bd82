"""Speed, memory and accuracy of the update, measured: README.md has the tables."""
