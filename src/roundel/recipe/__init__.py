"""The recipe: everything that decides a run, as one value; read from presets, files and dictionaries."""
