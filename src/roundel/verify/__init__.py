"""The last gate: a file is legal and close to the float model, or it does not appear."""

from roundel.verify.advice import advice
from roundel.verify.closeness import check_prepared, compare_outputs
from roundel.verify.legality import check_file

__all__ = ["advice", "check_file", "check_prepared", "compare_outputs"]
