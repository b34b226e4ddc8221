"""`roundel search`: a study over recipe fields with Optuna, which is imported only where it is used."""

from roundel.studies.engine import Trial
from roundel.studies.search import SearchResult, search
from roundel.studies.space import Choice, Span, read_space

__all__ = ["Choice", "SearchResult", "Span", "Trial", "read_space", "search"]
