"""Quantize again and again to choose: `roundel auto` climbs formats, `roundel search` recipe fields."""
