"""What a person or another program reads about a run."""
