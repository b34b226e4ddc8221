"""Input that means harm, made by chance and by rule: `scripts/fuzz.py` runs it, each case from its number."""
