"""The version, apart from everything that could be expensive to import."""

VERSION = "0.1.0"
