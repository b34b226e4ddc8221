"""What Roundel can do, as functions: the commands call these, and so does who imports it."""
